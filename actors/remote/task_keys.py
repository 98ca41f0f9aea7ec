"""Keys of tasks for agents on other machines, all derived from one secret.

The run and `headway serve-tasks` have the secret in their environment. A key that an agent gets
with a task names it, so that neither the death of the relay nor that of an actor makes it invalid.
"""

import base64
import hashlib
import hmac
import json
import os
from dataclasses import dataclass, field
from typing import Self

from headway.errors import InputError

VARIABLE = "HEADWAY_TASKS_KEY"
"""Environment variable with the secret."""
SHORTEST = 16


@dataclass(frozen=True, slots=True)
class TaskKeys:
    """The keys that belong to a secret."""

    secret: bytes = field(repr=False)

    @classmethod
    def of_environment(cls) -> Self:
        """Return the keys of this process's secret; raise InputError if it has none."""
        secret = os.environ.get(VARIABLE, "").strip()
        if len(secret) < SHORTEST:
            raise InputError(
                f'actors.environment = "remote" needs the environment variable {VARIABLE}, with at '
                f"least {SHORTEST} characters, in the run and in `headway serve-tasks`; make one "
                f"by: export {VARIABLE}=$(openssl rand -hex 32)"
            )
        return cls(secret.encode())

    @property
    def of_actors(self) -> str:
        """Key of actors, which offer tasks."""
        return self._signature("actors")

    @property
    def of_agents(self) -> str:
        """Key with which agents fetch tasks."""
        return self._signature("agents")

    def of_session(self, task: str, take: int) -> str:
        """Return the key of the agent that has taken a task; later takes have higher numbers."""
        named = json.dumps([task, take])
        text = base64.urlsafe_b64encode(named.encode()).decode().rstrip("=")
        return f"{text}.{self._signature(f'session {named}')}"

    def read(self, key: str) -> tuple[str, int] | None:
        """Return task and take of a session's key; None for a key that is none."""
        text = key.partition(".")[0]
        try:
            task, take = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
            same = same_key(key, self.of_session(task, take))
        except (ValueError, TypeError, RecursionError):
            return None
        return (task, take) if same else None

    def _signature(self, text: str) -> str:
        return hmac.new(self.secret, text.encode(), hashlib.sha256).hexdigest()


def same_key(key: str, right: str) -> bool:
    """Compare keys in a time that says nothing about the right one."""
    return hmac.compare_digest(key.encode(errors="replace"), right.encode())

"""The agent `remote`: offers rollouts to agents on other machines, and awaits their results."""

import json
import logging
import math
from typing import Any

import httpx
from pydantic import Field

from actors.bounded_http import BadAnswer, ask
from actors.errors import EnvironmentFailed, Excused, ServiceAway
from actors.outages import ask as wait_for
from actors.programs.agent import AgentGone, AgentResult, AgentTask, failure, result_of
from actors.remote.relay import MOVED, POLL_SECONDS
from actors.remote.task_keys import VARIABLE, TaskKeys
from actors.rewards.find_reward import NoNumber
from headway import clock
from headway.errors import InputError
from headway.options import parse_options
from headway.recipe_section import Section

NAME = "remote"
ANSWER_SECONDS = POLL_SECONDS + 15.0
MOST_BYTES = 4 << 20
NOBODY_SECONDS = 60.0
"""Time without any agent after which a warning is due."""

log = logging.getLogger(__name__)


class RemoteOptions(Section):
    """The keys of actors.environment_options."""

    relay: str = Field(default="http://127.0.0.1:8701", pattern="^https?://.+[^/]$")
    """Address at which the actors reach `headway serve-tasks`."""
    silent_seconds: float = Field(default=600.0, gt=0)
    """Longest time between requests of an agent; past it another one gets the task."""


class RemoteAgent:
    """Offers tasks to the relay (an `Agent`)."""

    def __init__(self, options: RemoteOptions, keys: TaskKeys) -> None:
        self._url = f"{options.relay}/offers"
        self._headers = {"Authorization": f"Bearer {keys.of_actors}"}
        self._client = httpx.AsyncClient(trust_env=False, timeout=None)
        self._waits_since: float | None = None
        """When the first task was offered, until an agent has fetched any."""

    async def play(self, task: AgentTask) -> AgentResult:
        """See `Agent`; AgentGone is raised where the agent that took the task is silent."""
        offer = {
            "id": task.rollout_id,
            "task": task.described(),
            "address": task.base_url.removesuffix("/v1"),
            "key": task.api_key,
            "turns": task.turns,
        }
        answer: dict[str, Any] = {"take": 0, "left": False, "result": None}
        while answer["result"] is None:
            if answer["left"]:
                raise AgentGone(failure(NAME, task, "was silent for too long"))
            offer["take"] = answer["take"]
            self._notice(is_fetched=answer["take"] > 0)
            answer = await wait_for(
                "the relay of tasks", lambda: self._asked(offer), EnvironmentFailed
            )
        if "error" in answer["result"]:
            problem = f"reported: {answer['result']['error']}"
            raise EnvironmentFailed(failure(NAME, task, problem))
        try:
            return result_of(answer["result"].get("reward", answer["result"].get("text")))
        except NoNumber as error:
            raise EnvironmentFailed(failure(NAME, task, str(error))) from None

    def _notice(self, *, is_fetched: bool) -> None:
        """Warn once if no agent comes."""
        if is_fetched:
            self._waits_since = math.inf
        elif self._waits_since is None:
            self._waits_since = clock.now()
        elif clock.now() - self._waits_since > NOBODY_SECONDS:
            self._waits_since = math.inf
            log.warning("no agent has fetched a task from %s in %g s", self._url, NOBODY_SECONDS)

    async def _asked(self, offer: dict[str, Any]) -> dict[str, Any]:
        try:
            answer = await ask(
                self._client, self._url, seconds=ANSWER_SECONDS, most_bytes=MOST_BYTES,
                json=offer, headers=self._headers,
            )  # fmt: skip
        except BadAnswer as error:
            raise ServiceAway(f"the relay at {self._url} gave {error}") from error
        if answer.status == 401:
            raise InputError(f"the relay at {self._url} has another {VARIABLE} than this run")
        if answer.status == MOVED:
            raise Excused(f"rollout {offer['id']} is played by another actor now")
        if answer.status != 200:
            raise ServiceAway(f"the relay at {self._url} answered status {answer.status}")
        try:
            fields = json.loads(answer.text)
            return {name: fields[name] for name in ("take", "left", "result")}
        except (ValueError, TypeError, KeyError, RecursionError):
            problem = f"{answer.text[:100]!r}, must be a take, left and a result"
            raise ServiceAway(f"the relay at {self._url} gave {problem}") from None

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()


def load_remote(name: str, options: dict[str, Any]) -> RemoteAgent:
    """Return the agent; raise InputError for wrong options, or without the variable VARIABLE."""
    return RemoteAgent(read_options(options), TaskKeys.of_environment())


def read_options(options: dict[str, Any]) -> RemoteOptions:
    """Check the options of the agent; raise InputError for wrong ones."""
    return parse_options(RemoteOptions, f"actors.environment_options of {NAME!r}", options)

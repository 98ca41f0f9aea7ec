"""Tasks that wait for agents, those that agents work on, and what they report.

    an actor offers a task ─▶ an agent takes it ─▶ its requests ─▶ its result ─▶ the actor hears it
          ▲                                            │
          ├── another actor, if the first is gone ◀────┤ the agent goes on
          └── the same, with a new session ◀───────────┘ the agent is silent: another takes the task

A task that is offered with no turn of an earlier attempt is new: agents of before are refused.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from actors.gateway.requests import Refused
from headway import clock

T = TypeVar("T")
ABSENT_SECONDS = 10.0
"""Time without a call of its actor after which a task is given to no agent."""
FROZEN_SECONDS = 60.0
"""The same after which nobody waits for an answer of its gateway any more."""
FORGOTTEN_SECONDS = 3600.0
"""The same after which it is forgotten."""


@dataclass(slots=True, eq=False, kw_only=True)
class Task:
    """A rollout that an actor has offered."""

    id: str
    text: Mapping[str, Any]
    """Its prompt, as agents get it."""
    address: str | None
    """Address of the gateway with its session; None while that is not reached."""
    key: str
    """Key of that session."""
    take: int
    """Number of the agent that has it, higher for later ones; 0 while none has."""
    begun: str = ""
    """Key of the last session that an agent has left."""
    refused: int = 0
    """Agents up to this number are of a rollout that has ended."""
    asked_at: float = 0.0
    """Time of the last call of its actor, which waits for the result."""
    heard_at: float = 0.0
    """Time of the last sign of the agent."""
    requests: int = 0
    """Requests of the agent that are being answered."""
    result: Mapping[str, Any] | None = None


class TaskBoard:
    """All tasks of one relay; `silent_seconds` is the longest time between requests of an agent."""

    def __init__(self, silent_seconds: float, *, now: Callable[[], float] = time.monotonic) -> None:
        self._silent_seconds, self._now = silent_seconds, now
        self._tasks: dict[str, Task] = {}
        self._changed = asyncio.Event()

    def offer(self, offered: Task, turns: int) -> Task:
        """Take note of a task, or of its new session with so many turns; return it as it is."""
        task, now = self._tasks.setdefault(offered.id, offered), self._now()
        failed = task.result is not None and "error" in task.result
        if task is offered:
            task.heard_at = now
            for known in [*self._tasks.values()]:
                if now - known.asked_at > FORGOTTEN_SECONDS and known is not task:
                    del self._tasks[known.id]
        elif task.key != offered.key and (failed or not turns):
            task.take, task.refused, task.result = 0, max(task.take, task.refused), None
        task.text, task.address, task.key = offered.text, offered.address, offered.key
        task.asked_at = now
        self.change()
        return task

    def is_left(self, task: Task) -> bool:
        """Return True if an agent has begun the session of a task, and is silent since."""
        now = self._now()
        task.asked_at = now
        silent = now - task.heard_at > self._silent_seconds
        if task.take and silent and not task.requests and task.result is None:
            task.take, task.begun = 0, task.key
        return task.begun == task.key

    def claim(self) -> Task | None:
        """Give the oldest task that waits to an agent; None if there is none."""
        now = self._now()
        for task in self._tasks.values():
            absent = task.address is None or now - task.asked_at > ABSENT_SECONDS
            if not (task.take or absent or task.result is not None or task.begun == task.key):
                task.take, task.heard_at = round(1e6 * clock.now()), now
                return task
        return None

    def find(self, task_id: str, take: int) -> Task | None:
        """Return the task of an agent; None while no actor has a session for it.

        Raises Refused if its rollout has ended, or another agent has it.
        """
        task = self._tasks.get(task_id)
        if task is None or task.address is None or task.begun == task.key:
            return None
        if take <= task.refused:
            raise Refused(410, "the task was begun anew, and this agent's part in it has ended")
        if take < task.take:
            raise Refused(410, "another agent has the task, since this one was silent")
        task.take = take  # as it was, or as it was before a restart of the relay
        return task

    @contextmanager
    def hearing(self, task: Task) -> Iterator[None]:
        """Keep a task from being taken back in the block, in which its agent asks something."""
        task.requests += 1
        try:
            yield
        finally:
            task.requests -= 1
            task.heard_at = self._now()

    def lose(self, task: Task, key: str) -> None:
        """Take note that the session of a key is not reached; its actor may offer it again."""
        if task.key == key:
            task.address = None

    async def frozen(self, task: Task) -> None:
        """Return once the actor of a task has not called for FROZEN_SECONDS."""
        while (left := task.asked_at + FROZEN_SECONDS - self._now()) > 0:
            await self.until(bool, left)

    def report(self, task: Task, result: Mapping[str, Any]) -> None:
        """Keep the result of a task; raise Refused if it has another."""
        if task.result not in (None, result):
            raise Refused(409, "the task has another result already")
        task.result = result
        self.change()

    def change(self) -> None:
        """Have those who wait look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, condition: Callable[[], T], seconds: float) -> T:
        """Return what a condition returns as soon as that is true, or after some seconds."""
        answer = condition()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not answer:
                    await self._changed.wait()
                    answer = condition()
        return answer

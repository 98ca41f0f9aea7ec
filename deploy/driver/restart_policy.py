"""Restarts of a process that dies: how many in a row, how long apart, reported and recorded."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from deploy.driver.run_context import RunContext
from deploy.errors import RunFailed
from deploy.runtime.restart_budget import SETTLED_SECONDS, RestartBudget
from deploy.storage.run_record import RECOVERIES
from queues.runtime import clock
from queues.runtime.daemon_thread import run_in_daemon_thread

WRITE_SECONDS = 10.0
"""Longest time that a restart waits for its record."""


@dataclass(frozen=True, slots=True)
class Clock:
    """The clock that supervisors use."""

    monotonic: Callable[[], float] = time.monotonic
    time: Callable[[], float] = clock.now
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


class Restarts:
    """Counts the deaths of one process, and allows as many restarts as `deploy.max_restarts`.

    The record, `restarts.jsonl` and the console of the run get every restart; the record and
    `recoveries.jsonl` get how long the process was away.
    """

    def __init__(self, context: RunContext, name: str, clock: Clock) -> None:
        self._context, self._name, self._clock = context, name, clock
        self._budget = RestartBudget(context.config.deploy.max_restarts)
        self._died_at: float | None = None
        """Monotonic seconds since when the process is away; None while it works or first starts."""

    async def allow(self, reason: str, *, worked: float, silent: float = 0.0) -> None:
        """Wait until a process that died after `worked` seconds may be restarted.

        It had not answered for `silent` seconds, which count as lost.

        Raises:
            RunFailed: The process died more often in a row than deploy.max_restarts.
        """
        if self._died_at is None:
            self._died_at = self._clock.monotonic() - silent
        wait = self._budget.next_wait(settled=worked >= SETTLED_SECONDS)
        if wait is None:
            raise RunFailed(self._budget.exhausted(self._name, reason))
        at = self._clock.time()
        with suppress(TimeoutError):  # the watchdog reports a disk that hangs
            async with asyncio.timeout(WRITE_SECONDS):
                await run_in_daemon_thread(
                    lambda: note_restart(self._context, self._name, self._budget, reason, at)
                )
        await self._clock.sleep(wait)

    async def await_start(self, start: Awaitable[None]) -> None:
        """Wait until the process has started, and print that.

        Raises:
            RunFailed: It takes longer than deploy.start_timeout_seconds.
        """
        seconds = self._context.config.deploy.start_timeout_seconds
        deadline = asyncio.timeout(seconds)
        try:
            async with deadline:
                await start
        except TimeoutError:
            if not deadline.expired():
                raise
            raise RunFailed(
                f"{self._name} did not start within deploy.start_timeout_seconds = {seconds:g}"
            ) from None
        again = ""
        if self._died_at is not None:
            away, self._died_at = self._clock.monotonic() - self._died_at, None
            again = f" again, after {away:.1f} s"
            at = self._clock.time()
            await run_in_daemon_thread(lambda: note_recovery(self._context, self._name, away, at))
        self._context.console.say(f"{self._name} is ready{again}")


def note_restart(
    context: RunContext, name: str, budget: RestartBudget, reason: str, at: float
) -> None:
    """Print and record a restart."""
    context.record.restarts[name] += 1
    context.console.say(
        f"{name} is restarted ({budget.in_a_row} of {budget.limit} in a row): {reason}"
    )
    row = {"actor": name, "at": at, "in_a_row": budget.in_a_row, "reason": reason}
    context.jsonl.write("restarts.jsonl", [row])


def note_recovery(context: RunContext, name: str, seconds: float, at: float) -> None:
    """Record how long a process was away that works again."""
    context.record.away[name] = context.record.away.get(name, 0.0) + seconds
    row = {"process": name, "at": at, "seconds": seconds}
    context.jsonl.write(RECOVERIES, [row])

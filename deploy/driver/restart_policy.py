"""Restarts of a process that dies: their limit, waits, records, and the timing of supervisors."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from deploy.driver.run_context import RunContext
from deploy.errors import RunFailed
from deploy.runtime.restart_budget import RestartBudget
from deploy.storage.run_record import RECOVERIES, RESTARTS
from headway import clock
from headway.daemon_thread import run_in_daemon_thread
from headway.hang_detection import LOADING_SILENT_SECONDS, SILENT_SECONDS

WRITE_SECONDS = 10.0
"""Longest time that a restart, or a process that works again, waits for its record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The clock, interval and deadlines of a supervisor, in seconds."""

    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    poll_seconds: float = 2.0
    """Interval of requests for statistics; a process that dies loses what came after the last."""
    answer_seconds: float = 5.0
    """Deadline of an answer to a request for statistics."""
    silent_seconds: float = SILENT_SECONDS
    """Time without an answer after which a process that works hangs."""
    loading_silent_seconds: float = LOADING_SILENT_SECONDS
    """The same for a process that loads."""
    resend_seconds: float = 60.0
    """Deadline for the engine to have taken the newest weights once more."""


TIMING = Timing()


class Restarts:
    """Counts the deaths of one process, and allows as many restarts as `deploy.max_restarts`.

    The record, `restarts.jsonl` and the console of the run get every restart; the record and
    `recoveries.jsonl` get how long the process was away.
    """

    def __init__(self, context: RunContext, name: str, timing: Timing) -> None:
        self._context, self._name, self._timing = context, name, timing
        self._budget = RestartBudget(context.config.deploy.max_restarts)
        self._died_at: float | None = None
        """Monotonic seconds since when the process is away; None while it works or first starts."""

    @property
    def is_away(self) -> bool:
        """True from a death of the process until another works."""
        return self._died_at is not None

    async def allow(self, reason: str, silent: float, *, settled: bool) -> None:
        """Wait until a process that died may be restarted.

        It had not answered for `silent` seconds, which count as lost. Deaths are counted anew where
        the process had `settled` before this one.

        Raises:
            RunFailed: The process died more often in a row than deploy.max_restarts.
        """
        if self._died_at is None:
            self._died_at = self._timing.monotonic() - silent
        wait = self._budget.next_wait(settled=settled)
        if wait is None:
            raise RunFailed(self._budget.exhausted(self._name, reason))
        row = note_restart(self._context, self._name, self._budget, reason)
        await self._write(RESTARTS, row)
        await self._timing.sleep(wait)

    def forget(self) -> None:
        """Begin anew, for a process that left or was given up and joins again."""
        self._budget.in_a_row, self._died_at = 0, None

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
            away, self._died_at = self._timing.monotonic() - self._died_at, None
            again = f" again, after {away:.1f} s"
            row = note_recovery(self._context, self._name, away)
            await self._write(RECOVERIES, row)
        self._context.console.say(f"{self._name} is ready{again}")

    async def _write(self, file: str, row: dict[str, Any]) -> None:
        with suppress(TimeoutError):  # the watchdog reports a disk that hangs
            async with asyncio.timeout(WRITE_SECONDS):
                await run_in_daemon_thread(lambda: self._context.jsonl.write(file, [row]))


def note_restart(
    context: RunContext, name: str, budget: RestartBudget, reason: str
) -> dict[str, Any]:
    """Print and record a restart; return its row of `restarts.jsonl`."""
    context.record.restarts[name] += 1
    context.console.say(
        f"{name} is restarted ({budget.in_a_row} of {budget.limit} in a row): {reason}"
    )
    return {"actor": name, "at": clock.now(), "in_a_row": budget.in_a_row, "reason": reason}


def note_recovery(context: RunContext, name: str, seconds: float) -> dict[str, Any]:
    """Record how long a process was away that works again; return its row of `recoveries.jsonl`."""
    context.record.away[name] = context.record.away.get(name, 0.0) + seconds
    return {"process": name, "at": clock.now(), "seconds": seconds}

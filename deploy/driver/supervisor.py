"""Keeps a process of a run alive: the one supervisor of all kinds of processes.

    start ─▶ work ─▶ its work is done
      ▲        └─▶ died, or does not answer ─▶ clear away ─▶ wait ─▶ prepare ─┐
      └───────────────────────────────────────────────────────────────────────┘

A kind of process is a subclass, whose methods say how it starts, works and ends, and which of its
errors another process may not meet. Any other error ends the run, such as bad input, a loss that is
not finite, weights of another model, a lost broker, or a bug; so does a process that keeps dying,
unless the run can do without it.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from deploy.driver.run_context import RunContext
from deploy.errors import RunFailed
from deploy.runtime.restart_budget import SETTLED_SECONDS, RestartBudget
from headway.daemon_thread import run_in_daemon_thread
from headway.errors import HeadwayError
from headway.hang_detection import LOADING_SILENT_SECONDS, SILENT_SECONDS, until_silent
from headway.roles import ProcessName
from learner.errors import RankFailed

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


class Silent(HeadwayError):
    """A process that did not answer for so many seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"it did not answer within {seconds:g} s")
        self.silent_seconds = seconds


class Supervisor(ABC):
    """One process, or the ranks of a learner, through all of their restarts."""

    def __init__(self, context: RunContext, name: ProcessName, timing: Timing = TIMING) -> None:
        self.name = name
        self.metrics: dict[ProcessName, str] = {}
        """Addresses of the metrics of the present processes, as host:port, once they are known."""
        self._context, self._timing = context, timing
        self._say = context.console.say
        self._budget = RestartBudget(context.config.deploy.max_restarts)
        self._died_at: float | None = None
        """Monotonic seconds since when the process is away; None while it works or first starts."""
        self._working = asyncio.Event()
        """Set while a process has started."""
        self._since: float | None = None
        """Monotonic seconds since when the process works; None before."""
        self._trained = context.record.version
        """Version at the last death, or at the begin."""
        self._ended: tuple[str, float] | None = None
        """Why the process was ended, if it did not die by itself, and its seconds of silence."""

    @property
    @abstractmethod
    def handles(self) -> Mapping[ProcessName, Any]:
        """Handles in Ray of the present processes."""

    @abstractmethod
    async def _start(self, *, again: bool) -> None:
        """Create the process, `again` after a death, and return when it can work."""

    @abstractmethod
    async def _work(self) -> None:
        """Return when the work of the process is done; raise how it ended otherwise."""

    @abstractmethod
    def _reason(self, error: Exception) -> str | None:
        """Describe an error that another process may not meet; None if it would meet it too."""

    @abstractmethod
    def _kill(self) -> None:
        """End the process at once, if there is one."""

    async def _clear_away(self, error: Exception | None = None) -> bool:
        """End what is left of a process that died; return False if there is to be no other."""
        self._kill()
        return True

    async def _prepare(self) -> None:  # noqa: B027  (most need nothing)
        """Do what is needed before another process is made."""

    def _is_settled(self, worked: float) -> bool:
        """Return True if a process that died after `worked` seconds had worked well before."""
        return worked >= SETTLED_SECONDS

    def _is_dispensable(self, exhausted: RunFailed) -> bool:
        """Return True if the run goes on without the process, which died too often."""
        return False

    @property
    def is_wanted(self) -> bool:
        """True while another process is to take the place of one that dies."""
        return True

    @property
    def starts(self) -> bool:
        """True until the process works, for the first time or again."""
        return self._since is None

    def restart(self, reason: str, silent: float = 0.0) -> None:
        """End the process, if it works, for another; its seconds of silence count as lost."""
        if not self.starts:
            self._ended = reason, silent
            self._kill()

    async def start(self, *, timed: bool = False) -> bool:
        """Start the process, again if it dies; return False if there is to be none.

        Without `timed`, the caller sets the deadline of the first start. Raises what a new process
        would meet too, and RunFailed if it died too often (deploy.max_restarts), and is needed.
        """
        again = self._died_at is not None
        while True:
            try:
                if again:
                    await self._prepare()
                starting = self._start(again=again)
                await (self._await_start(starting) if again or timed else starting)
            except Exception as error:  # noqa: BLE001  (raised unless it has a reason)
                if not await self._recover(error):
                    return False
                again = True
            else:
                self._working.set()
                return True

    async def run(self) -> None:
        """Have the process work until that is done; start it first, if `start` has not.

        Raises what `start` raises.
        """
        while self.is_wanted and (self._working.is_set() or await self.start(timed=True)):
            self._since = self._timing.monotonic()
            try:
                await self._work()
            except Exception as error:  # noqa: BLE001  (raised unless it has a reason)
                if not await self._recover(error):
                    return
            else:
                return

    async def keep(self) -> None:
        """Keep a process at work that `start` starts the first time; see `run`."""
        await self._working.wait()
        await self.run()

    async def _await_start(self, starting: Awaitable[None]) -> None:
        """Wait until the process has started, before a deadline, and print and record that."""
        seconds = self._context.config.deploy.start_timeout_seconds
        deadline = asyncio.timeout(seconds)
        try:
            async with deadline:
                await starting
        except TimeoutError:
            if not deadline.expired():
                raise
            raise RunFailed(
                f"{self.name} did not start within deploy.start_timeout_seconds = {seconds:g}"
            ) from None
        again = ""
        if self._died_at is not None:
            away, self._died_at = self._timing.monotonic() - self._died_at, None
            again = f" again, after {away:.1f} s"
            await self._write(lambda: self._context.record_recovery(self.name, away))
        self._say(f"{self.name} is ready{again}")

    async def _recover(self, error: Exception) -> bool:
        """Clear away what died, and wait; return False if no other is to be started."""
        ended, self._ended = self._ended, None
        failure = ""
        if ended is None:
            reason = self._reason(error)
            if reason is None:
                raise error
            failure = reason if self._since is None else ""
            silent = error.silent_seconds if isinstance(error, RankFailed | Silent) else 0.0
            ended = reason, silent
        worked = None if self._since is None else self._timing.monotonic() - self._since
        self._since = None
        self._working.clear()
        if not await self._clear_away(error) or not self.is_wanted:
            return False
        settled = worked is not None and self._is_settled(worked)
        self._trained = self._context.record.version
        reason, silent = ended
        if self._died_at is None:
            self._died_at = self._timing.monotonic() - silent
        wait = self._budget.next_wait(settled=settled, failure=failure)
        if wait is None:
            exhausted = RunFailed(self._budget.exhausted(self.name, reason))
            if self._is_dispensable(exhausted):
                return False
            raise exhausted
        await self._write(lambda: self._context.record_restart(self.name, self._budget, reason))
        await self._timing.sleep(wait)
        return self.is_wanted

    async def _write(self, record: Callable[[], None]) -> None:
        with suppress(TimeoutError):  # the watchdog reports a disk that hangs
            async with asyncio.timeout(WRITE_SECONDS):
                await run_in_daemon_thread(record)

    async def _heard(
        self,
        work: Awaitable[Any],
        ping: Callable[[], Awaitable[Any]],
        seconds: float,
        *,
        placed: bool = True,
    ) -> None:
        """Await a call of the process; raise Silent if `until_silent` returns meanwhile."""
        working = asyncio.ensure_future(work)
        hearing = asyncio.create_task(until_silent(ping, seconds, placed=placed))
        hearing.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            await asyncio.wait({working, hearing}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done() and hearing.exception() is None:
                raise Silent(seconds)
            await working  # which the death of the process ends, too
        finally:
            working.cancel()
            hearing.cancel()

"""Keeps one rollout actor alive: restarts it when its process or engine dies or does not answer.

    start ─▶ run ─▶ the run is over
      ▲       ├─▶ leave ─▶ hand over the groups ─▶ kill ─▶ release its leases
      │       └─▶ died ─▶ kill what is left ─▶ release its leases ─▶ wait ─┐
      └────────────────────────────────────────────────────────────────────┘

Errors that a restart would only repeat end the run: bad input, weights of another model, a lost
broker or broadcaster, a bug. So does an actor that keeps dying, unless enough others are left.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from actors.errors import EngineDied
from actors.ray_actor import ActorSpec, create_actor
from actors.rollout.actor_statistics import ActorStatistics, engine_id_of, merge
from deploy.driver.restart_policy import Clock, Restarts
from deploy.driver.run_context import RunContext
from deploy.errors import RunFailed
from deploy.observability.waits import ActorHealth
from headway.errors import first_line
from headway.hang_detection import LOADING_SILENT_SECONDS, SILENT_SECONDS, until_silent
from queues.errors import QueueClosed
from queues.records import Purpose
from weight_sync.errors import DeadlineExceeded, LoadFailed

HAND_OVER_SHARE = 0.6
"""Share of the deadline of `stop` in which rollouts must be saved; the rest is for its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The clock, interval and deadlines of a supervisor, in seconds."""

    clock: Clock = Clock()  # noqa: RUF009  (frozen)
    poll_seconds: float = 2.0
    """Interval of requests for statistics; a process that dies loses what came after the last."""
    answer_seconds: float = 5.0
    """Deadline of an answer to a request for statistics."""
    silent_seconds: float = SILENT_SECONDS
    """Time without an answer after which a process that works hangs."""
    loading_silent_seconds: float = LOADING_SILENT_SECONDS
    """That of a process that loads."""
    resend_seconds: float = 60.0
    """Deadline for the engine to have taken the newest weights once more."""


class ActorSupervisor:
    """One rollout actor through all of its restarts.

    The broker gets the leases of a dead actor back, and the broadcaster its permit to swap weights.
    `counts` returns how many actors of the run work or start, and how many are needed.
    """

    def __init__(
        self,
        context: RunContext,
        spec: ActorSpec,
        counts: Callable[[], tuple[int, int]],
        create: Callable[[ActorSpec], Any] = create_actor,
        timing: Timing = Timing(),
    ) -> None:
        self.number = spec.index
        self.name = f"actor-{spec.index}"
        self.engine_id = engine_id_of(spec.index)
        self._spec, self._create, self._timing = spec, create, timing
        self._say, self._counts = context.console.say, counts
        self._restarts = Restarts(context, self.name, timing.clock)
        self.given_up = False
        """True if it died too often, and the run goes on without it."""
        self.left = False
        """True from `leave` on; whoever calls `run` again sets it back."""
        self.joins = False
        """True for an actor that is added to a live run, until it works: any other does without."""
        self.handle: Any = None
        """Ray's handle of the present process; None while there is none."""
        self._working_since: float | None = None
        """Monotonic seconds; None while it starts."""
        self._earlier: list[dict[str, Any]] = []
        """The last statistics of each process that died."""
        self._statistics: dict[str, Any] | None = None
        """The newest statistics of the present process."""
        self._ended: str | None = None
        """Why the present process was ended, if it did not die by itself."""
        self._silent = 0.0
        """Seconds for which it had not answered then."""

    def restart(self, reason: str, silent: float = 0.0) -> None:
        """End the process, so that `run` creates another; nothing while there is none at work.

        It has not answered for `silent` seconds, which count as lost.
        """
        if self.handle is not None and self._working_since is not None:
            self._ended, self._silent = reason, silent
            ray.kill(self.handle)

    async def resend(self) -> None:
        """Have the engine take the newest weights once more, whole, if it answers in time."""
        if self.handle is None or self._working_since is None:
            return
        with suppress(RayError, TimeoutError):
            async with asyncio.timeout(self._timing.resend_seconds):
                await self.handle.resend.remote()

    async def stop(self, seconds: float) -> None:
        """Have the actor save its running rollouts and take no further lease, within `seconds`."""
        if self.handle is None or self._working_since is None:
            return
        with suppress(RayError, TimeoutError):
            async with asyncio.timeout(seconds):
                await self.handle.stop.remote(HAND_OVER_SHARE * seconds)

    async def leave(self, seconds: float) -> None:
        """End `run`: the actor hands over what it samples, in time, and its process ends.

        `run` may be called again after it has returned.
        """
        self.left = True
        await self.stop(seconds)
        await self._ask()  # what it has sampled in the end
        if self.handle is not None:
            ray.kill(self.handle)

    def join(self) -> None:
        """Begin anew, as an actor that is added to a live run, after which `run` may be called."""
        self.given_up, self.joins = False, True
        self._restarts.forget()

    async def start(self) -> bool:
        """Create the process and load the model, again if it dies; return False if it is given up.

        Raises:
            RunFailed: It died more often in a row than deploy.max_restarts, and is needed.
            RayError: `RolloutActor.start` raised something that a new actor would raise too.
        """
        try:
            await self._load()
        except RayError as error:
            reason = self._cause(error)
        else:
            return True
        while await self._recover(reason, worked=0.0):
            try:
                await self._restarts.await_start(self._load())
            except (RayError, RunFailed) as error:
                reason = self._cause(error)
            else:
                return True
        return False

    async def run(self) -> None:
        """Work until the run is over, or the actor leaves or is given up.

        Starts the process first, if `start` has not.

        Raises:
            RunFailed: It died more often in a row than deploy.max_restarts, and is needed.
            RayError: The actor raised something that a new actor would raise too.
            HeadwayError: The broker is lost.
            HeadwayError: The broadcaster is lost.
        """
        while not (self.given_up or self.left):
            self._working_since = None
            reason = await self._live()
            now = self._timing.clock.monotonic()
            worked = 0.0 if self._working_since is None else now - self._working_since
            if reason is None or not await self._recover(reason, worked=worked):
                break
        if self.left:
            self._working_since = None
            if self.handle is not None:
                await self._clear_away()

    async def statistics(self) -> dict[str, Any]:
        """Return `ActorStatistics.statistics` summed over all processes that this actor had."""
        await self._ask()
        parts = [*self._earlier, *([self._statistics] if self._statistics else [])]
        if parts:
            return merge(parts)
        return {**ActorStatistics(self.engine_id).statistics(), "pid": None}

    @property
    def health(self) -> ActorHealth | None:
        """The actor's state as the watchdog needs it; None while the actor starts."""
        if self._working_since is None:
            return None
        statistics = self._statistics or {}
        evaluates = self._spec.purpose is Purpose.EVALUATE
        return ActorHealth(
            engine_id=self.engine_id,
            running=statistics.get("running_rollouts", 0),
            finished=statistics.get("rollouts", 0),
            pinned_seconds=self._spec.pinned_seconds if evaluates else 0.0,
        )

    @property
    def metrics(self) -> str | None:
        """Address of the present process's metrics, once it is known."""
        return self._statistics["metrics"] if self._statistics else None

    async def _live(self) -> str | None:
        """Run the actor, created first if it is gone; return why it died, or None at the end."""
        watching = asyncio.create_task(self._watch())
        try:
            if self.handle is None:
                await self._restarts.await_start(self._load())
            self._working_since, self.joins = self._timing.clock.monotonic(), False
            async with self._ended_if_silent(self._timing.silent_seconds):
                await self.handle.run.remote()
        except (RayError, RunFailed) as error:
            return self._cause(error)
        finally:
            watching.cancel()
        return None

    @asynccontextmanager
    async def _ended_if_silent(self, seconds: float, *, placed: bool = True) -> AsyncIterator[None]:
        """Kill the process if it does not answer for `seconds`, so that a call in the block fails.

        If Ray may not have `placed` it yet, the time begins at its first answer.
        """

        async def hear(handle: Any) -> None:
            with suppress(RayError):  # it died, which ends its call as well
                if not placed:
                    await handle.ping.remote()
                await until_silent(handle.ping.remote, seconds)
                self._ended, self._silent = f"it did not answer within {seconds:g} s", seconds
                ray.kill(handle)

        hearing = asyncio.create_task(hear(self.handle))
        try:
            yield
        finally:
            hearing.cancel()

    async def _load(self) -> None:
        self.handle = self._create(self._spec)
        async with self._ended_if_silent(self._timing.loading_silent_seconds, placed=False):
            await self.handle.start.remote()

    async def _recover(self, reason: str, *, worked: float) -> bool:
        """Clear away the process that died after `worked` seconds; return False if it is the last.

        That is so if the run is over, or the actor leaves or is given up.
        """
        silent, self._silent = self._silent, 0.0
        before = len(self._earlier)
        if not await self._clear_away() or self.left:
            return False
        finished = any(statistics["rollouts"] for statistics in self._earlier[before:])
        try:
            await self._restarts.allow(reason, worked=worked, progressed=finished, silent=silent)
        except RunFailed as error:
            present, needed = self._counts()
            needed = 1 if self.joins else needed
            if self._spec.purpose is Purpose.EVALUATE or present <= needed:
                raise
            self.given_up, self._working_since = True, None
            others = f"{present - 1} of at least {needed} actor(s)"
            self._say(f"{self.name} is given up, {others} go on: {error}")
        return not self.given_up

    async def _clear_away(self) -> bool:
        """End the process and release its leases; return False if the run is over."""
        await self._ask()
        if self._statistics is not None:
            self._earlier.append({**self._statistics, "running_rollouts": 0})
        if self.handle is not None:
            ray.kill(self.handle)
        self.handle, self._statistics = None, None
        try:
            await self._spec.broker.release(self.engine_id)
        except QueueClosed:
            return False
        await self._spec.broadcaster.release(self.engine_id)
        return True

    async def _watch(self) -> None:
        """Keep the actor's newest statistics, which are needed when it is dead."""
        while True:
            await self._ask()
            await asyncio.sleep(self._timing.poll_seconds)

    async def _ask(self) -> None:
        """Take the newest statistics, if the actor answers."""
        actor = self.handle
        if actor is None:
            return
        try:
            async with asyncio.timeout(self._timing.answer_seconds):
                statistics = await actor.statistics.remote()
        except (TimeoutError, RayError):
            return  # it hangs or died, which ends `run` as well
        if actor is self.handle:
            self._statistics = statistics

    def _cause(self, error: RayError | RunFailed) -> str:
        """Return why the process was ended, or describe an error that a new one may not meet.

        Raises:
            RayError: The error itself, if a new actor would meet it too.
        """
        ended, self._ended = self._ended, None
        return ended or _describe(error)


def _describe(error: RayError | RunFailed) -> str:
    if not isinstance(error, (RayTaskError, RunFailed)):
        return f"its process died: {first_line(error)}"  # of its node's memory or node too
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, (EngineDied, DeadlineExceeded, LoadFailed, RunFailed)):
        return first_line(cause)
    raise error

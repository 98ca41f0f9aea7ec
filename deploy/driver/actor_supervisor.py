"""Supervises a rollout actor, which may also leave a run, join it again, or be given up."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from actors.errors import EngineDied
from actors.ray_actor import ActorSpec, create_actor
from actors.rollout.actor_statistics import ActorStatistics, merge
from deploy.driver.run_context import RunContext
from deploy.driver.supervisor import TIMING, Silent, Supervisor, Timing
from deploy.errors import RunFailed
from deploy.observability.waits import ActorHealth
from headway.errors import first_line
from headway.ray_process import death_of
from headway.roles import ProcessName, Role
from queues.errors import QueueClosed
from queues.records import Purpose
from weight_sync.errors import DeadlineExceeded, LoadFailed

HAND_OVER_SHARE = 0.6
"""Share of the deadline of `stop` in which rollouts must be saved; the rest is for its answer."""


class ActorSupervisor(Supervisor):
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
        timing: Timing = TIMING,
    ) -> None:
        super().__init__(context, ProcessName(Role.ACTOR, spec.index), timing)
        self.number, self.engine_id = spec.index, self.name.engine_id
        self._spec, self._create, self._counts = spec, create, counts
        self.given_up = False
        """True if it died too often, and the run goes on without it."""
        self.left = False
        """True from `leave` on; whoever calls `run` again sets it back."""
        self.joins = False
        """True for an actor that is added to a live run, until it works: any other does without."""
        self.handle: Any = None
        """Ray's handle of the present process; None while there is none."""
        self._earlier: list[dict[str, Any]] = []
        """The last statistics of each process that died."""
        self._statistics: dict[str, Any] | None = None
        self._finished = False
        """True if the last process that died had finished a rollout."""

    @property
    def handles(self) -> Mapping[ProcessName, Any]:
        """Handle in Ray of the present process; none while there is no process."""
        return {} if self.handle is None else {self.name: self.handle}

    @property
    def is_wanted(self) -> bool:
        """True unless the actor leaves or is given up."""
        return not (self.left or self.given_up)

    async def resend(self) -> None:
        """Have the engine take the newest weights once more, whole, if it answers in time."""
        if not self.starts:
            with suppress(RayError, TimeoutError):
                async with asyncio.timeout(self._timing.resend_seconds):
                    await self.handle.resend.remote()

    async def stop(self, seconds: float) -> None:
        """Have the actor save its running rollouts and take no further lease, within `seconds`."""
        if not self.starts:
            with suppress(RayError, TimeoutError):
                async with asyncio.timeout(seconds):
                    await self.handle.stop.remote(HAND_OVER_SHARE * seconds)

    async def leave(self, seconds: float) -> None:
        """End `run`: the actor hands over what it samples, in time, and its process ends."""
        self.left = True
        await self.stop(seconds)
        await self._ask()  # what it has sampled in the end
        self._kill()

    def join(self) -> None:
        """Begin anew, as an actor that is added to a live run; `run` may be called then."""
        self.given_up, self.joins = False, True
        self._budget.in_a_row, self._died_at = 0, None

    async def run(self) -> None:
        """Work until the run is over, or the actor leaves or is given up; see `Supervisor.run`."""
        await super().run()
        if self.left:
            self._since = None
            self._working.clear()
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
        if self.starts:
            return None
        statistics = self._statistics or {}
        evaluates = self._spec.purpose is Purpose.EVALUATE
        return ActorHealth(
            engine_id=self.engine_id,
            running=statistics.get("running_rollouts", 0),
            finished=statistics.get("rollouts", 0),
            pinned_seconds=self._spec.pinned_seconds if evaluates else 0.0,
            outages=statistics.get("outages", ()),
        )

    async def _start(self, *, again: bool) -> None:
        self.handle = self._create(self._spec)
        seconds = self._timing.loading_silent_seconds
        start, ping = self.handle.start.remote(), self.handle.ping.remote
        await self._heard(start, ping, seconds, placed=False)

    async def _work(self) -> None:
        self.joins = False
        watching = asyncio.create_task(self._watch())
        try:
            run, ping = self.handle.run.remote(), self.handle.ping.remote
            await self._heard(run, ping, self._timing.silent_seconds)
        finally:
            watching.cancel()

    def _kill(self) -> None:
        if self.handle is not None:
            ray.kill(self.handle)

    def _reason(self, error: Exception) -> str | None:
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, EngineDied | DeadlineExceeded | LoadFailed | RunFailed | Silent):
            return first_line(cause)
        died = isinstance(error, RayError) and not isinstance(error, RayTaskError)
        return f"its process died: {death_of(error)}" if died else None

    def _is_settled(self, worked: float) -> bool:
        return self._finished or super()._is_settled(worked)

    def _is_dispensable(self, exhausted: RunFailed) -> bool:
        present, needed = self._counts()
        needed = 1 if self.joins else needed
        if self._spec.purpose is Purpose.EVALUATE or present <= needed:
            return False
        self.given_up = True
        others = f"{present - 1} of at least {needed} actor(s)"
        self._say(f"{self.name} is given up, {others} go on: {exhausted}")
        return True

    async def _clear_away(self, error: Exception | None = None) -> bool:
        """End the process and release its leases; return False if the run is over."""
        if isinstance(error, Silent):
            self._kill()  # at once: it would not answer
        await self._ask()
        self._finished = bool(self._statistics and self._statistics["rollouts"])
        if self._statistics is not None:
            self._earlier.append({**self._statistics, "running_rollouts": 0})
        self._kill()
        self.handle, self._statistics, self.metrics = None, None, {}
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
        if (actor := self.handle) is None:
            return
        try:
            async with asyncio.timeout(self._timing.answer_seconds):
                statistics = await actor.statistics.remote()
        except (TimeoutError, RayError):
            return  # it hangs or died, which ends `run` as well
        if actor is self.handle:
            self._statistics = statistics
            self.metrics = {self.name: at} if (at := statistics["metrics"]) else {}

"""Keeps one rollout actor alive: makes it again when its process or its engine dies.

    start ─▶ run ─▶ the run is over
      ▲       └─▶ died ─▶ kill what is left ─▶ release what it held ─▶ wait ─┐
      └──────────────────────────────────────────────────────────────────────┘

A new actor gets the newest weights by its receiver, and no lease before. What would only happen
again ends the run: bad input, weights of another model, a broker or a broadcaster that is lost, a
bug. So does an actor that keeps dying.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from actors.errors import EngineDied
from actors.rollout.actor_statistics import ActorStatistics, engine_id_of, merge
from deploy.config.run_config import DeployConfig
from deploy.driver.restart_policy import Restarts
from deploy.errors import RunFailed, first_line
from deploy.observability.waits import ActorHealth
from deploy.runtime.console import Screen
from deploy.storage.jsonl import JsonlWriter
from deploy.storage.run_record import Record
from queues.errors import QueueClosed
from queues.protocols import WorkQueue
from weight_sync.errors import DeadlineExceeded, LoadFailed
from weight_sync.ray_broadcaster import BroadcasterClient

POLL_SECONDS = 2.0
"""Between two looks at the statistics; what came after the last one is lost with the process."""
HAND_OVER_SECONDS = 8.0
"""How long an actor may take to hand over what it is sampling."""
ANSWER_SECONDS = 5.0
"""Deadline of an actor's answer about itself."""


class Supervisor:
    """One rollout actor over all its lives.

    Args:
        index: Number among the actors, from 0.
        create: Makes its process, as `actors.ray_actor.create_actor` does.
        broker: Gets the leases of a dead one back.
        broadcaster: Likewise its permit to swap, for which other engines wait.
        config: Section `[deploy]`: start_timeout_seconds and max_restarts.
        record: Counts the restarts.
        rows: Gets one of `restarts.jsonl` for each.
        screen: Says them.
        pinned_seconds: How long it may keep a version to evaluate it.
    """

    def __init__(
        self,
        index: int,
        create: Callable[[], Any],
        *,
        broker: WorkQueue,
        broadcaster: BroadcasterClient,
        config: DeployConfig,
        record: Record,
        rows: JsonlWriter,
        screen: Screen,
        pinned_seconds: float = 0.0,
    ) -> None:
        self.name = f"actor-{index}"
        self._engine_id = engine_id_of(index)
        self._create = create
        self._broker, self._broadcaster, self._config = broker, broadcaster, config
        self._screen, self._pinned_seconds = screen, pinned_seconds
        self._restarts = Restarts(self.name, config=config, record=record, rows=rows, screen=screen)
        self._actor: Any = None
        self._working_since: float | None = None
        """Monotonic seconds; None while it starts."""
        self._lives: list[dict[str, Any]] = []
        """What each earlier life last said of itself."""
        self._said: dict[str, Any] | None = None
        """What the present one last said."""
        self._answers = True
        """Whether it did when it was asked last."""

    async def stop(self) -> None:
        """Has the actor save what it is sampling; it takes up nothing any more.

        Returns when it has, or after HAND_OVER_SECONDS; at once where it does not work.
        """
        if self._working_since is None:
            return
        with suppress(RayError, TimeoutError):
            async with asyncio.timeout(HAND_OVER_SECONDS):
                await self._actor.stop.remote()

    async def start(self) -> None:
        """Creates the process and loads the model.

        Raises:
            RayError: The process died, or what `RolloutActor.start` raised.
        """
        self._actor = self._create()
        await self._actor.start.remote()

    async def run(self) -> None:
        """Works until the run is over; to be called after `start`.

        Raises:
            RunFailed: It died more often in a row than deploy.max_restarts.
            RayError: What the actor raised, if a new one would raise it too.
            QueuesError: The broker is lost.
            WeightSyncError: The broadcaster is.
        """
        while True:
            self._working_since = None
            reason = await self._live()
            worked = 0.0 if self._working_since is None else time.monotonic() - self._working_since
            if reason is None or not await self._clear_away():
                return
            await self._restarts.allow(reason, worked=worked)

    async def statistics(self) -> dict[str, Any]:
        """See `ActorStatistics.statistics`, summed over its lives; a dead one as last reported."""
        await self._ask()
        said = self._lives if self._said is None else [*self._lives, self._said]
        return (
            merge(said) if said else {**ActorStatistics(self._engine_id).statistics(), "pid": None}
        )

    @property
    def handle(self) -> Any:
        """Of the present life in Ray, from its start; None while there is none."""
        return self._actor

    @property
    def health(self) -> ActorHealth | None:
        """What the watchdog sees of it; None while it starts."""
        if self._working_since is None:
            return None
        said = self._said or {}
        return ActorHealth(
            engine_id=self._engine_id,
            answers=self._answers,
            running=said.get("running_rollouts", 0),
            finished=said.get("rollouts", 0),
            pinned_seconds=self._pinned_seconds,
        )

    @property
    def metrics(self) -> str | None:
        """Where Prometheus finds the metrics of the present life, once they are known."""
        return self._said["metrics"] if self._said else None

    async def _live(self) -> str | None:
        """Runs the actor, made first where it is gone; why it died, or None: the run is over."""
        watching = asyncio.create_task(self._watch())
        try:
            if self._actor is None:
                await self._start_again()
            self._working_since = time.monotonic()
            await self._actor.run.remote()
        except (RayError, RunFailed) as error:
            return _why(error)
        finally:
            watching.cancel()
        return None

    async def _start_again(self) -> None:
        """As `start`, under its deadline.

        Raises:
            RayError: As `start`.
            RunFailed: It took too long.
        """
        seconds = self._config.start_timeout_seconds
        deadline = asyncio.timeout(seconds)
        try:
            async with deadline:
                await self.start()
        except TimeoutError:
            if not deadline.expired():
                raise
            raise RunFailed(
                f"it did not start within deploy.start_timeout_seconds = {seconds:g}"
            ) from None
        self._screen.say(f"{self.name} is ready again")

    async def _clear_away(self) -> bool:
        """Ends what is left of the actor and returns what it held; whether the run goes on."""
        await self._ask()
        if self._said is not None:
            self._lives.append({**self._said, "running_rollouts": 0})
        ray.kill(self._actor)
        self._actor, self._said = None, None
        try:
            await self._broker.release(self._engine_id)
        except QueueClosed:
            return False
        await self._broadcaster.release(self._engine_id)
        return True

    async def _watch(self) -> None:
        """Keeps what the actor says of itself, for when it is dead."""
        while True:
            await self._ask()
            await asyncio.sleep(POLL_SECONDS)

    async def _ask(self) -> None:
        """Takes the newest statistics, if the actor answers."""
        actor = self._actor
        if actor is None:
            return
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                said = await actor.statistics.remote()
        except TimeoutError:
            self._answers = False
        except RayError:
            return  # it died, which `run` learns by itself
        else:
            self._answers = True
            if actor is self._actor:
                self._said = said


def _why(error: RayError | RunFailed) -> str:
    """What to say about an error that a new actor may not meet again.

    Raises:
        RayError: The error itself, if it would.
    """
    if isinstance(error, RayActorError):
        return f"its process died: {first_line(error)}"
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, (EngineDied, DeadlineExceeded, LoadFailed, RunFailed)):
        return first_line(cause)
    raise error

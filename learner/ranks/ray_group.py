"""The learner group as its driver sees it: N processes behind one object.

    driver ─start─▶ rank 0, 1, …           load at once, meet in a store of rank 0
    driver ─run──▶ rank 0 ─update, gather, capture, write─▶ rank 1, …
       ├──live────────────────────────────────────────────▶ rank 1, …      their deaths, at once
       └──ping────────────────────────────────────────────▶ rank 0, 1, …   that they answer

The first rank that dies or raises ends the group, by name; who created it may create another, which
goes on from a checkpoint. Rank 0 leads the others (`ray_leader`). A rank answers in a thread of its
own while it computes: a collective operation that hangs is left to the watchdog.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError

from headway.hang_detection import (
    LOADING_SILENT_SECONDS,
    PING_SECONDS,
    SILENT_SECONDS,
    until_silent,
)
from headway.metrics import MetricsAccess
from learner.errors import RankFailed
from learner.ranks.ray_calls import call_rank
from learner.ranks.ray_rank import RankActor
from learner.ranks.spec import LearnerSpec, environment

GRACE_SECONDS = 5.0
"""Time that a lost connection waits for the death that explains it."""
ANNOUNCE_SECONDS = 30.0
"""Time for a version to be announced again before it is tried once more."""
ANSWER_SECONDS = 5.0
"""Deadline of a rank's answer about itself."""


class LearnerGroup:
    """The ranks of a learner; see `create_learner`."""

    def __init__(
        self,
        ranks: list[Any],
        *,
        silent_seconds: float = SILENT_SECONDS,
        loading_silent_seconds: float = LOADING_SILENT_SECONDS,
        ping_seconds: float = PING_SECONDS,
    ) -> None:
        self.handles = ranks
        """Handles of the ranks' processes in Ray, in order."""
        self._ping_seconds, self._silent_seconds = ping_seconds, silent_seconds
        self._loading_silent_seconds = loading_silent_seconds

    async def start(self) -> None:
        """Load the policy in all ranks at once.

        Raises:
            HeadwayError: A rank died, hangs or cannot be loaded; see `RankFailed`.
        """
        address = None
        if len(self.handles) > 1:
            [address] = await self._first_failure({0: self.handles[0].open_store.remote()})
        loading = {i: rank.start.remote(address) for i, rank in enumerate(self.handles)}
        await self._first_failure(loading, self._hear_all(loading=True))

    async def run(self, broker: Any, broadcaster: Any) -> int:
        """Train from the loaded weights to the last version or to `stop`.

        Returns:
            The version reached; its weights are published and its checkpoint is committed.

        Raises:
            HeadwayError: A rank died, raised or does not answer; the others are ended.
        """
        leader, *followers = self.handles
        running = leader.run.remote(followers, broker, broadcaster)
        watched = [call_rank(i, rank.live.remote()) for i, rank in enumerate(self.handles) if i]
        watched += self._hear_all()
        [reached] = await self._first_failure({0: running}, watched)
        return int(reached)

    async def watch(self) -> None:
        """Wait until a rank dies or hangs after `run`, and raise RankFailed; the others end."""
        living = {i: rank.live.remote() for i, rank in enumerate(self.handles)}
        await self._first_failure(living, self._hear_all())

    def _hear_all(self, *, loading: bool = False) -> list[Coroutine[Any, Any, Any]]:
        return [self._hear(i, rank, loading=loading) for i, rank in enumerate(self.handles)]

    async def _hear(self, number: int, rank: Any, *, loading: bool) -> None:
        """Ask a rank again and again, and raise RankFailed once it does not answer any more."""
        seconds = self._loading_silent_seconds if loading else self._silent_seconds

        async def ping() -> None:
            await call_rank(number, rank.ping.remote())

        await until_silent(ping, seconds, interval=self._ping_seconds, placed=not loading)
        problem = f"rank {number} hangs: no answer in {seconds:g} s"
        raise RankFailed(problem, died=True, silent_seconds=seconds)

    async def serve_metrics(self, access: MetricsAccess) -> list[str]:
        """Have the ranks serve their metrics until they end; return host:port of each."""
        return [
            await call_rank(i, rank.serve_metrics.remote(access))
            for i, rank in enumerate(self.handles)
        ]

    async def paused(self) -> str | None:
        """Return why a rank waits for disk space; None where none does, or none answers in time."""
        calls = (
            call_rank(i, rank.paused.remote(), timeout=ANSWER_SECONDS)
            for i, rank in enumerate(self.handles)
        )
        answers = await asyncio.gather(*calls, return_exceptions=True)
        return next((reason for reason in answers if isinstance(reason, str)), None)

    async def announce_again(self) -> None:
        """Have rank 0 announce its newest version once more; Ray may lose a call, so it repeats."""
        with suppress(RankFailed, RayError):  # new ranks announce by themselves
            while True:
                call = self.handles[0].announce_again.remote()
                with suppress(TimeoutError):
                    await call_rank(0, call, timeout=ANNOUNCE_SECONDS)
                    return

    def stop(self) -> None:
        """End `run` at the next batch boundary, with a checkpoint; returns at once."""
        with suppress(RayError):
            self.handles[0].stop.remote()

    def kill(self) -> None:
        """End every rank, whatever it is doing."""
        for rank in self.handles:
            ray.kill(rank)

    async def _first_failure(
        self, needed: Mapping[int, Any], watched: Sequence[Coroutine[Any, Any, Any]] = ()
    ) -> list[Any]:
        """Return the results of the needed calls, or raise the first failure, of `watched` too.

        The failure is the root cause where that shows within GRACE_SECONDS, since a rank that lost
        its connection to another fails too.
        """
        calls = [call_rank(rank, call) for rank, call in needed.items()]
        tasks = [asyncio.create_task(call) for call in (*calls, *watched)]
        waited, pending = tasks[: len(needed)], set(tasks)
        try:
            while not all(task.done() for task in waited):
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                if any(task.exception() for task in done):
                    await self._fail(tasks)
            return [task.result() for task in waited]
        finally:
            for task in pending:
                task.cancel()

    async def _fail(self, tasks: list[asyncio.Task[Any]]) -> None:
        """End the group and raise the failure that is most likely the root cause."""
        deadline = asyncio.get_running_loop().time() + GRACE_SECONDS
        while True:
            errors = [error for task in tasks if task.done() and (error := task.exception())]
            error = min(errors, key=lambda error: not _is_root_cause(error))
            pending = [task for task in tasks if not task.done()]
            left = deadline - asyncio.get_running_loop().time()
            if _is_root_cause(error) or not pending or left <= 0:
                break
            await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        self.kill()
        raise error


def _is_root_cause(error: BaseException) -> bool:
    return not isinstance(error, RankFailed) or error.is_root_cause


def create_learner(
    spec: LearnerSpec, options_of: Callable[[int], Mapping[str, Any]] = lambda _: {}
) -> LearnerGroup:
    """Create the learner's processes on the cluster.

    `options_of` gives the Ray actor options of a rank, such as `scheduling_strategy`.
    """
    actors = rank_actors(RankActor, spec, options_of)
    return LearnerGroup([actor.remote(spec, rank) for rank, actor in enumerate(actors)])


def rank_actors(
    process: type[RankActor], spec: LearnerSpec, options_of: Callable[[int], Mapping[str, Any]]
) -> list[Any]:
    """Return the Ray actor class of each rank, with what its process reserves."""
    config = spec.config
    return [
        ray.remote(process).options(
            num_cpus=config.cpus_of_rank,
            num_gpus=config.gpus,
            max_concurrency=8,
            runtime_env={"env_vars": environment(config, spec.weight_sync.transport)},
            **options_of(rank),
        )
        for rank in range(config.ranks)
    ]

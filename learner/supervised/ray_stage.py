"""A stage of supervised training on several ranks, each a process in Ray.

driver ─start─▶ rank 0, 1, …    load the model, as a learner's ranks do
└─────train───▶ rank 0, 1, …    the same batch, while the driver draws the next one
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import ray

from headway.daemon_thread import run_in_daemon_thread
from learner.ranks.ray_group import LearnerGroup, rank_actors
from learner.ranks.ray_rank import RankActor

if TYPE_CHECKING:
    from learner.ranks.rank import Rank
    from learner.supervised.row_training import Progress
    from learner.supervised.stage import Stage


class StageRank(RankActor):
    """Trains a stage on the batches that it is given. Created by `create_stage`."""

    def __init__(self, stage: "Stage", rank: int) -> None:
        super().__init__(stage.spec, rank)
        self._stage, self._batches = stage, deque[Sequence[Any] | None]()

    def _state(self) -> str:
        return f"{self}: {self._stage.spec.section}"

    def _rank_type(self) -> type["Rank"]:
        return self._stage.rank_type

    def _load(self, address: tuple[str, int] | None) -> None:
        super()._load(address)
        self._steps = self._stage.run(self._rank, iter(self._batches.popleft, None))

    async def train(self, batch: Sequence[Any] | None) -> "Progress | None":
        """Train the next batch; None says that there is none, and has the model written."""
        self._batches.append(batch)
        return await self._call(next, self._steps, None)


class StageGroup(LearnerGroup):
    """The ranks of a stage; see `create_stage`."""

    async def train(
        self, batches: Iterator[Sequence[Any]], report: "Callable[[Progress], None]"
    ) -> None:
        """Train on the batches that the stage has steps left for, and write its model.

        Raises:
            HeadwayError: A rank died, raised or does not answer, or a batch cannot be drawn.
        """
        draw = partial(run_in_daemon_thread, partial(next, batches, None), name="batches")
        batch = await draw()
        while batch is not None:
            batch, progress = await asyncio.gather(draw(), self._train(batch))
            report(progress)
        await self._train(None)

    async def _train(self, batch: Sequence[Any] | None) -> Any:
        shared = ray.put(batch)
        running = {i: rank.train.remote(shared) for i, rank in enumerate(self.handles)}
        progress, *_ = await self._first_failure(running, self._hear_all())
        return progress


def create_stage(
    stage: "Stage", options_of: Callable[[int], Mapping[str, Any]] = lambda _: {}
) -> StageGroup:
    """Create the processes of a stage on the cluster, as `create_learner` does a learner's."""
    actors = rank_actors(StageRank, stage.spec, options_of)
    described = ray.put(stage)
    return StageGroup([actor.remote(described, rank) for rank, actor in enumerate(actors)])

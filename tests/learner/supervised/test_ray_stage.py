"""The ranks of a stage over Ray: batches go in, progress comes out, and failures have a name."""

import asyncio
import os
import sys
from itertools import count, islice
from pathlib import Path

import pytest
import ray

from headway.errors import InputError
from learner.config.learner import LearnerConfig
from learner.errors import RankFailed
from learner.ranks.ray_group import rank_actors
from learner.ranks.spec import LearnerSpec
from learner.supervised.ray_stage import StageGroup, StageRank

pytestmark = [pytest.mark.ray, pytest.mark.deepspeed]
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

SECONDS = 200.0
"""Deadline of every wait."""


class SumRank(StageRank):
    """Sums batches up without a model; the last rank does what is planned for a step."""

    def __init__(self, rank, spec, plan, written):
        super().__init__(Planned(spec), rank)
        self.plan, self.written = plan if rank == spec.config.ranks - 1 else {}, written

    def _load(self, address):
        self._steps = self.sums(iter(self._batches.popleft, None))

    def sums(self, batches):
        total = 0
        for step, batch in enumerate(batches, 1):
            self.plan.get(step, int)()
            total += sum(batch)
            yield total
        Path(f"{self.written}-{self._number}").write_text(str(total))


class Planned:
    """A stage that has a specification and no more."""

    def __init__(self, spec):
        self.spec = spec


def die():
    os._exit(3)


def refuse():
    raise InputError("no such model")


@pytest.fixture
def train(ray_cluster, tmp_path):
    """Return a function that trains two ranks; returns progress, and what each rank wrote."""

    def train(batches, plan=None):
        spec = LearnerSpec(config=LearnerConfig(ranks=2), model_path="none", seed=0, steps=1)
        actors = rank_actors(SumRank, spec, lambda rank: {})
        written, progress = tmp_path / "total", []
        planned = spec, plan or {}, str(written)
        group = StageGroup([actor.remote(i, *planned) for i, actor in enumerate(actors)])

        async def trained():
            async with asyncio.timeout(SECONDS):
                await group.start()
                await group.train(batches, progress.append)

        try:
            asyncio.run(trained())
        finally:
            group.kill()
        return progress, [file.read_text() for file in sorted(tmp_path.glob("total-*"))]

    return train


def five():
    return islice(([n, n] for n in count()), 5)


def test_every_rank_is_given_every_batch_in_order_and_ends_after_the_last(train):
    assert train(five()) == ([0, 2, 6, 12, 20], ["20", "20"])


@pytest.mark.parametrize(
    ("plan", "message"),
    [({3: die}, "rank 1 died"), ({2: refuse}, "rank 1: no such model")],
)
def test_a_rank_that_dies_or_raises_is_named(train, plan, message):
    with pytest.raises(RankFailed, match=message):
        train(five(), plan)


def test_a_batch_that_cannot_be_drawn_is_the_error(train):
    def batches():
        yield [1]
        raise InputError("rows.jsonl:2: no completion")

    with pytest.raises(InputError, match=r"rows\.jsonl:2"):
        train(batches())

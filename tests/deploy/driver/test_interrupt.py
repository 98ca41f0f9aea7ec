"""What an interrupt waits for, with a run of a few lines."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from deploy.config.loader import load_recipe
from deploy.errors import RayDied
from deploy.run import SAVE_FACTOR, Run, save_seconds
from tests.deploy.driver.contexts import make_context, output
from tests.deploy.trained import train
from weight_sync.announcements import WeightUpdateReport


class LiveRun(Run):
    """A run whose learner ends when it is stopped, unless its ranks are made again."""

    def __init__(self, folder, *, starts, saves):
        self.context = make_context(folder)
        self.saves, self.stopped = saves, asyncio.Event()
        self.learner = SimpleNamespace(starts=starts, saved=False, stop=self.stopped.set)
        actor = SimpleNamespace(stop=lambda seconds: asyncio.sleep(0))
        fleet = SimpleNamespace(actors=[actor])
        self.processes = SimpleNamespace(learner=self.learner, fleet=fleet)
        self.recorder = SimpleNamespace(conclude=lambda status: asyncio.sleep(0))

    async def learn(self):
        await self.stopped.wait()
        if self.learner.starts:
            await asyncio.Event().wait()
        self.learner.saved = self.saves


@pytest.mark.parametrize(
    ("starts", "saves"), [(False, True), (False, False), (True, False)],
    ids=["ranks live", "a rank dies", "ranks load"],
)  # fmt: skip
def test_an_interrupt_says_when_no_checkpoint_was_saved_and_waits_for_none_that_cannot_come(
    tmp_path, starts, saves
):
    run = LiveRun(tmp_path, starts=starts, saves=saves)
    train(run.context.directory, [{}])

    async def scenario():
        run.learning = asyncio.create_task(run.learn())
        training = asyncio.create_task(asyncio.Event().wait())
        with pytest.raises(KeyboardInterrupt):
            await run.interrupt(training, SimpleNamespace(insisted=None))
        run.learning.cancel()
        return output(run.context)

    printed = asyncio.run(asyncio.wait_for(scenario(), 10))
    assert ("no checkpoint was saved" in printed) == (not saves)


def test_a_signal_that_ends_ray_too_is_an_interrupt(tmp_path):
    run = LiveRun(tmp_path, starts=False, saves=False)
    train(run.context.directory, [{}])

    async def lose_ray():
        raise RayDied("Ray is gone")

    async def scenario():
        run.learning, training = (asyncio.create_task(lose_ray()) for _ in range(2))
        run.learning.cancel()
        await asyncio.wait({run.learning, training})
        with pytest.raises(KeyboardInterrupt):
            await run.interrupt(training, SimpleNamespace(insisted=None))

    asyncio.run(asyncio.wait_for(scenario(), 10))


@pytest.mark.parametrize(
    ("learner", "sent", "seconds"),
    [
        ("bfloat16", None, 0.0),  # engines have taken nothing yet
        ("bfloat16", 10**9, 14 * 5e8 / 25e6),
        ("float32", 10**9, 16 * 2.5e8 / 25e6),
        ("bfloat16", 15 * 10**9, 1800.0),  # a model of 7 billion parameters
    ],
)
def test_the_first_checkpoint_gets_the_time_of_its_bytes(tmp_path, learner, sent, seconds):
    config = load_recipe("demo", [f"learner.dtype={learner}", "learner.zero_stage=2"])
    context = replace(make_context(tmp_path), config=config)
    train(context.directory, [{}])
    if sent is not None:
        update = WeightUpdateReport(
            engine_id="a", version=0, published_at=0.0, bytes=1, full_bytes=sent, staged_at=0.0,
            swap_started_at=0.0,
        )  # fmt: skip
        context.record.swaps.append(update)
    assert save_seconds(context) == pytest.approx(seconds)
    if sent is not None:
        train(context.directory, [{}], first=1, saved=(2,))
        assert 0 < save_seconds(context) < SAVE_FACTOR * 60  # the last one tells

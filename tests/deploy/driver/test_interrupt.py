"""What an interrupt waits for, with a run of a few lines."""

import asyncio
from types import SimpleNamespace

import pytest

from deploy.run import Run
from tests.deploy.driver.contexts import make_context, output
from tests.deploy.trained import train


class LiveRun(Run):
    """A run whose learner ends when it is stopped, unless its ranks are made again."""

    def __init__(self, folder, *, starts, saves):
        self.context = make_context(folder)
        self.saves, self.stopped = saves, asyncio.Event()
        self.learner = SimpleNamespace(starts=starts, saved=False, stop=self.stopped.set)
        actor = SimpleNamespace(stop=lambda: asyncio.sleep(0))
        self.processes = SimpleNamespace(learner=self.learner, actors=[actor])
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

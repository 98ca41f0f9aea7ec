"""The supervisor of a process that Ray restarts, with a process of a few lines."""

import asyncio
import contextlib

import pytest
from ray.exceptions import RayActorError, RayTaskError

from deploy.driver.service_supervisor import ServiceSupervisor
from deploy.driver.supervisor import Timing
from deploy.errors import RunFailed
from headway.errors import InputError
from headway.hang_detection import SILENT_SECONDS
from headway.roles import Role
from queues.errors import BrokerLostError, LedgerError
from tests.deploy.driver.contexts import SupervisorStage, output
from weight_sync.errors import BroadcasterDied

HUNG = 5.5
"""Seconds of a life that ends by no answer."""


class Process:
    """Lives given lives: the seconds of each, or what its start raises; then for ever."""

    role = Role.REWARD_MODEL

    def __init__(self, stage, lives):
        self.stage, self.lives, self.starts = stage, lives, 0
        self.ended, self.hangs = 0, False
        self.loading_seconds = 0.0

    async def start(self, *, again=False):
        assert again == (self.starts > 0)
        self.starts += 1
        self.stage.now += self.loading_seconds
        if self.lives and isinstance(self.lives[0], Exception):
            raise self.lives.pop(0)

    async def live(self):
        if not self.lives:
            self.stage.settled.set()
            await asyncio.Event().wait()
        if self.lives[0] == HUNG:
            self.hangs = True
            await asyncio.Event().wait()
        self.stage.now += self.lives.pop(0)
        raise RayActorError

    async def ping(self):
        if self.hangs:
            raise TimeoutError

    def stop(self, *, again=False):
        assert again
        self.ended += 1
        if self.hangs:
            self.hangs = False
            self.stage.now += self.lives.pop(0)


class Stage(SupervisorStage):
    """A supervisor of such a process."""

    def __init__(self, folder, *lives, **settings):
        super().__init__(folder, lives, **settings)
        self.started, self.settled = [], asyncio.Event()
        self.process = Process(self, self.lives)
        self.restarted, self.on_sleep = 0, lambda: None
        self.supervisor = ServiceSupervisor(
            self.context, self.process, on_restart=self.on_restart, timing=Timing(**self.clock)
        )

    async def on_restart(self):
        self.started.append(not self.supervisor.starts)
        self.restarted += 1

    async def sleep(self, seconds):
        await super().sleep(seconds)
        self.started.append(not self.supervisor.starts)
        self.on_sleep()

    def play(self):
        async def scenario():
            working = asyncio.gather(self.supervisor.start(), self.supervisor.keep())
            settled = asyncio.create_task(self.settled.wait())
            await asyncio.wait({working, settled}, return_when=asyncio.FIRST_COMPLETED)
            for task in (working, settled):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await working

        asyncio.run(asyncio.wait_for(scenario(), 10))


def test_each_death_is_said_counted_and_followed_by_a_longer_wait(tmp_path):
    stage = Stage(tmp_path, 5.0, HUNG)
    assert stage.supervisor.starts
    stage.play()
    assert stage.started == [False] * 4, "from its death until it works"
    assert not stage.supervisor.starts
    assert stage.process.starts == 3
    assert stage.restarted == 2
    assert stage.process.ended == 1, "one that hangs is ended, one that died is not"
    assert stage.waits == [1.0, 2.0]
    assert stage.record.restarts == {"reward-model": 2}
    assert stage.record.away == {"reward-model": SILENT_SECONDS}, "it hung before that was noticed"
    rows = [(row["actor"], row["in_a_row"]) for row in stage.rows()]
    assert rows == [("reward-model", 1), ("reward-model", 2)]
    printed = output(stage.context)
    assert "reward-model is restarted (1 of 5 in a row): its process died" in printed
    assert f"(2 of 5 in a row): it did not answer within {SILENT_SECONDS:g} s" in printed


def test_one_that_dies_while_it_starts_for_the_first_time_is_restarted_too(tmp_path):
    stage = Stage(tmp_path, RayActorError())
    stage.play()
    assert (stage.process.starts, stage.restarted, stage.process.ended) == (2, 1, 0)
    assert stage.record.restarts == {"reward-model": 1}


@pytest.mark.parametrize("error", [BrokerLostError, BroadcasterDied, TimeoutError, RunFailed])
def test_one_that_hangs_while_it_starts_again_is_ended(tmp_path, error):
    stage = Stage(tmp_path, 5.0, error("no answer within 30 s"))
    stage.play()
    assert (stage.process.starts, stage.process.ended) == (3, 1)


def test_one_by_which_a_new_batch_was_trained_begins_anew(tmp_path):
    stage = Stage(tmp_path, 5.0, 5.0, 5.0, max_restarts=2)
    stage.on_sleep = lambda: stage.record.batches.append(None)
    stage.play()
    assert stage.waits == [1.0, 1.0, 1.0]


def test_time_to_load_does_not_count_as_work(tmp_path):
    stage = Stage(tmp_path, 5.0, 5.0, 5.0, max_restarts=2)
    stage.process.loading_seconds = 700.0
    with pytest.raises(RunFailed, match="died 3 times in a row"):
        stage.play()


@pytest.mark.parametrize("cause", [InputError("no model can be loaded"), LedgerError("damaged")])
@pytest.mark.parametrize("wraps", [True, False])
def test_one_that_would_meet_its_error_again_ends_the_run_with_it(tmp_path, cause, wraps):
    error = RayTaskError("start", "", cause) if wraps else cause
    with pytest.raises(type(error)) as caught:
        Stage(tmp_path, 5.0, error).play()
    assert caught.value is error

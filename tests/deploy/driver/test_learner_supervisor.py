"""The supervisor of the learner's ranks, with groups of a few lines."""

import asyncio

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from deploy.driver.learner_supervisor import LearnerSupervisor
from deploy.driver.supervisor import Timing
from deploy.errors import RunFailed
from headway.errors import HeadwayError, InputError
from headway.metrics import MetricsAccess
from learner.config.learner import LearnerConfig
from learner.errors import TrainingDiverged
from learner.ranks.ray_calls import rank_failure
from learner.ranks.spec import LearnerSpec
from queues.errors import JournalError
from tests.deploy.driver.contexts import SupervisorStage, output
from tests.deploy.trained import train
from tests.waiting import reached
from weight_sync.ray_broadcaster import BroadcasterClient

HANG = "hang"


def raised(cause, rank=0):
    """Return the failure of a rank that raised an error."""
    return rank_failure(rank, RayTaskError("run", "", cause))


def died(rank=0):
    return rank_failure(rank, ActorDiedError())


class Group:
    """Ranks that play one life: the error of `start` or None, and that of `run`."""

    def __init__(self, stage, spec, life):
        self.stage, self.spec = stage, spec
        self.started, self.ran = life if isinstance(life, tuple) else (None, life)
        self.handles = [None] * stage.ranks
        self.killed = asyncio.Event()
        stage.groups.append(self)
        stage.events.append(("create", spec.version, spec.checkpoint))

    async def start(self):
        await self._end(self.started)

    async def run(self, broker, broadcaster):
        assert broker.epoch == broadcaster.epoch
        self.stage.events.append(("run", broker.epoch))
        self.stage.now += 3600 * self.stage.hours
        self.stage.record.batches += [None] * self.stage.new_batches
        await self._end(self.ran)
        return 9

    async def watch(self):
        self.stage.events.append(("watch",))
        await self.killed.wait()
        raise died()

    async def _end(self, how):
        if how == HANG:
            await self.killed.wait()
            raise died()
        if how is not None:
            raise how

    def kill(self):
        self.stage.events.append(("kill",))
        self.killed.set()

    def stop(self):
        self.stage.events.append(("stop",))

    async def paused(self):
        return None

    async def serve_metrics(self, access):
        if self.stage.deaths:
            raise self.stage.deaths.pop()
        return [f"rank-{number}:1" for number in range(len(self.handles))]


class Broker:
    """The client of a broker; it knows the epoch of its caller."""

    def __init__(self, stage, epoch=0):
        self.stage, self.epoch = stage, epoch

    def of_epoch(self, epoch):
        return Broker(self.stage, epoch)

    async def begin_learner(self, epoch):
        if self.stage.silent:
            await self.stage.silent.pop().wait()
        self.stage.events.append(("begin", epoch))


class Stage(SupervisorStage):
    """A supervisor whose groups play given lives of some hours, after two trained batches."""

    def __init__(self, folder, *lives, ranks=1, saved=(), deaths=(), hours=0, **settings):
        super().__init__(folder, lives, **settings)
        self.ranks, self.deaths = ranks, list(deaths)
        self.silent, self.groups, self.lacks_room = [], [], 0
        self.hours, self.new_batches = hours, 0
        train(self.context.directory, [{}, {}], saved=saved)
        spec = LearnerSpec(config=LearnerConfig(), model_path="model", seed=0, steps=9)
        self.supervisor = LearnerSupervisor(
            self.context,
            spec,
            self.create,
            (Broker(self), BroadcasterClient(None)),
            access=MetricsAccess("localhost") if ranks > 1 else None,
            timing=Timing(**self.clock),
        )

    def create(self, spec):
        if self.lacks_room:
            self.lacks_room -= 1
            return None
        return Group(self, spec, self.lives.pop(0))


@pytest.mark.parametrize("saved", [(), (1,)])
def test_ranks_are_made_again_from_the_newest_checkpoint_and_fence_those_before(tmp_path, saved):
    stage = Stage(tmp_path, died(), None, saved=saved)
    stage.play()
    folder = str((tmp_path / "checkpoints" / "v000001").resolve()) if saved else None
    assert stage.events == [
        ("create", 0, None), ("run", 0), ("kill",), ("begin", 1),
        ("create", len(saved), folder), ("run", 1),
    ]  # fmt: skip
    [row] = stage.rows()
    assert (row["actor"], row["in_a_row"]) == ("learner", 1)
    assert row["reason"].startswith("rank 0 died: ")
    assert stage.record.restarts == {"learner": 1}
    printed = output(stage.context)
    assert "learner is restarted (1 of 5 in a row): rank 0 died" in printed
    assert f"the learner goes on from version {len(saved)}" in printed


CONNECTION = RuntimeError("Connection closed by peer")


@pytest.mark.parametrize(
    ("error", "ranks", "is_final"),
    [
        (died(1), 2, False),
        (raised(died(1)), 2, False),
        (raised(CONNECTION), 2, False),
        (raised(CONNECTION), 1, True),
        (raised(TrainingDiverged("the loss is nan")), 2, True),
        (raised(InputError("no such model")), 1, True),
        (raised(ZeroDivisionError("a bug")), 2, True),
        (raised(RuntimeError("CUDA error: out of memory")), 2, True),
    ],
)
@pytest.mark.parametrize("moment", ["run", "start"])
def test_only_what_new_ranks_may_not_meet_again_is_tried_again(
    tmp_path, error, ranks, is_final, moment
):
    stage = Stage(tmp_path, error if moment == "run" else (error, None), None, ranks=ranks)
    if is_final:
        with pytest.raises(HeadwayError) as caught:
            stage.play()
        assert caught.value is error
    else:
        stage.play()
    assert stage.record.restarts.total() == (not is_final)


def test_a_rank_that_dies_as_it_is_to_serve_metrics_is_made_again(tmp_path):
    stage = Stage(tmp_path, None, None, None, ranks=2, deaths=[died(1), died(1)])
    stage.play()
    reasons = [row["reason"] for row in stage.rows()]
    assert [reason[:12] for reason in reasons] == ["rank 1 died:", "rank 1 died:"]
    assert stage.supervisor.metrics == {"learner": "rank-0:1", "learner-1": "rank-1:1"}


@pytest.mark.parametrize("new_batches", [0, 1])
def test_only_ranks_that_train_a_new_batch_begin_to_count_anew(tmp_path, new_batches):
    stage = Stage(tmp_path, died(), died(), died(), None, max_restarts=2, hours=1)
    stage.new_batches = new_batches
    if new_batches:
        stage.play()
    else:
        with pytest.raises(RunFailed, match="learner died 3 times in a row"):
            stage.play()


@pytest.mark.parametrize("saved", [(1,), (1, 2)])
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_taken(tmp_path, saved):
    stage = Stage(tmp_path, died(), None, saved=saved)
    folder = tmp_path / "checkpoints" / f"v{saved[-1]:06d}"
    (folder / "model.safetensors").write_text("other weights")
    stage.play()
    created = [event[1] for event in stage.events if event[0] == "create"]
    assert created == [0, saved[-1] - 1]
    assert f"checkpoint {saved[-1]} is damaged: " in output(stage.context)
    assert not folder.exists()


def test_a_damaged_checkpoint_ends_the_run_if_batches_before_it_are_lost(tmp_path):
    stage = Stage(tmp_path, died(), saved=(1, 2))
    (tmp_path / "checkpoints" / "v000002" / "model.safetensors").write_text("other weights")
    for segment in (tmp_path / "journal").glob("*.segment"):
        segment.write_bytes(b"")
    with pytest.raises(JournalError, match="is part of batch 1"):
        stage.play()


def test_ranks_that_hang_are_ended_once_and_the_reason_is_recorded(tmp_path):
    stage = Stage(tmp_path, HANG, HANG, None)

    async def scenario():
        supervisor = stage.supervisor
        supervisor.restart_ranks(0, "it has not begun")
        await supervisor.start()
        running = asyncio.create_task(supervisor.run())
        for epoch in (0, 1):
            await reached(lambda epoch=epoch: ("run", epoch) in stage.events)
            supervisor.restart_ranks(1 - epoch, "not these")
            supervisor.restart_ranks(epoch, f"epoch {epoch} hangs", 300.0)
        await running

    asyncio.run(asyncio.wait_for(scenario(), 10))
    reasons = [row["reason"] for row in stage.rows()]
    assert reasons == ["epoch 0 hangs", "epoch 1 hangs"]
    assert stage.record.away["learner"] >= 600.0, "what they did not answer is lost"


def test_ranks_that_die_after_the_last_version_are_made_again_and_publish_it(tmp_path):
    stage = Stage(tmp_path, None, died(), None, saved=(2,))

    async def scenario():
        supervisor = stage.supervisor
        remaining = asyncio.create_task(supervisor.remain())
        await supervisor.start()
        await supervisor.run()
        for watched in (1, 2):
            await reached(lambda watched=watched: stage.events.count(("watch",)) == watched)
            assert supervisor.saved
            if watched == 1:
                stage.groups[0].killed.set()
        remaining.cancel()

    asyncio.run(asyncio.wait_for(scenario(), 10))
    again = ("create", 2, str((tmp_path / "checkpoints" / "v000002").resolve()))
    assert [event for event in stage.events if event[0] in ("run", "create", "watch")] == [
        ("create", 0, None), ("run", 0), ("watch",), again, ("run", 1), again, ("run", 2),
        ("watch",),
    ]  # fmt: skip


def test_a_rank_that_dies_while_the_run_stops_is_not_made_again(tmp_path):
    stage = Stage(tmp_path, HANG)

    async def scenario():
        await stage.supervisor.start()
        running = asyncio.create_task(stage.supervisor.run())
        await reached(lambda: ("run", 0) in stage.events)
        stage.supervisor.stop()
        stage.supervisor.restart_ranks(0, "it hangs")
        await running

    asyncio.run(asyncio.wait_for(scenario(), 10))
    assert [event for event, *_ in stage.events] == ["create", "run", "stop", "kill", "kill"]
    assert stage.record.restarts.total() == 0


def test_a_broker_that_does_not_answer_a_new_learner_has_the_same_deadline(tmp_path):
    stage = Stage(tmp_path, died(), None, start_timeout_seconds=0.05)
    stage.silent = [asyncio.Event()]
    stage.play()
    assert stage.record.restarts.total() == 2


def test_new_ranks_wait_for_a_node_within_the_deadline_of_their_start(tmp_path):
    stage = Stage(tmp_path, died(), None)
    stage.lacks_room = 2
    stage.play()
    assert stage.waits == [1, 1, 1], "one before the restart, and two for a node"
    assert output(stage.context).count("the learner waits for a node with free resources") == 1
    assert [event[0] for event in stage.events[-3:]] == ["begin", "create", "run"]
    folder = tmp_path / "again"
    folder.mkdir()
    stage = Stage(folder, died(), None, max_restarts=1, start_timeout_seconds=0.05)
    stage.lacks_room = 1_000_000
    with pytest.raises(RunFailed, match="did not start within"):
        stage.play()

"""The loop: the order of its calls, resuming, stopping, checkpoints."""

import asyncio
import time

import pytest
from rollouts import random_groups

from headway.errors import HeadwayError
from learner.diagnostics.batch_report import BatchReport
from learner.learner import Learner
from queues.errors import QueueClosed
from queues.records import Batch
from queues.schema import encode


class ScriptedQueue:
    """Answers from a list: a batch, None (a timeout) or QueueClosed; records calls.

    Batches of the versions `recorded` were trained before.
    """

    def __init__(self, events, answers, recorded=()):
        self.events, self.recorded = events, recorded
        self.answers = iter(answers)
        self.acknowledged = {}

    async def take(self, version, timeout):
        answer = next(self.answers, QueueClosed)
        self.events.append(f"take {version}")
        if answer is QueueClosed:
            raise QueueClosed("the run is over")
        return answer

    async def ack(self, version, statistics):
        self.events.append(f"ack {version}")
        self.acknowledged[version] = statistics
        return version not in self.recorded

    async def cursor(self):
        return "prompt 9"

    async def commit_checkpoint(self, version, path):
        self.events.append(f"commit {version} at {path}")


class RecordingTrainer:
    """Pretends to train; records calls."""

    def __init__(self, events):
        self.events = events
        self.saved = []

    async def update(self, payloads, version):
        self.events.append(f"update {version} with {len(payloads)}")
        figures = {"loss": 0.5, "rollouts_trained": 8, "tokens_trained": 100 + version}
        return BatchReport.from_dict(figures)

    async def publish(self, version):
        self.events.append(f"publish {version}")
        return asyncio.sleep(0, f"weights of {version}")

    async def save(self, version, *, cursor, totals, weights_checksum):
        self.events.append(f"save {version}")
        assert weights_checksum == f"weights of {version}"
        self.saved.append((version, cursor, totals))
        return self.write(version)

    async def write(self, version):
        return f"checkpoints/v{version:06d}"

    async def prune(self, version):
        self.events.append(f"prune {version}")


BATCH = Batch(version=0, payloads=[encode(item) for item in random_groups(count=2)])


def run(answers, *, stop=None, trainer=RecordingTrainer, recorded=(), events=None, **settings):
    """Run the learner; return the events in order, the queue, the version and the trainer."""
    events = [] if events is None else events
    queue, trainer = ScriptedQueue(events, answers, recorded), trainer(events)

    async def main():
        learner = Learner(trainer, queue, **{"steps": 2, "checkpoint_every": 10, **settings})
        return await learner.run(stop)

    reached = asyncio.run(main())
    return events, queue, reached, trainer


def test_weights_that_are_not_those_of_the_ledger_are_not_trained():
    events = []
    with pytest.raises(HeadwayError, match="version 6 were loaded with checksum weights of 6"):
        run([BATCH], events=events, steps=9, start_version=6, start_checksum="weights of 5")
    assert events == ["prune 6", "publish 6"]


def test_the_initial_weights_are_published_first_and_every_version_before_its_batch_is_acked():
    events, _, reached, _ = run([BATCH, BATCH])
    assert events == [
        "prune 0",
        "publish 0",
        "take 0",
        "update 0 with 2",
        "publish 1",
        "ack 0",
        "take 1",
        "update 1 with 2",
        "publish 2",
        "ack 1",
        "save 2",
        "commit 2 at checkpoints/v000002",
        "prune 2",
    ]
    assert reached == 2


def test_a_timeout_asks_for_the_same_version_again():
    events, *_ = run([None, None, BATCH], steps=1)
    assert [event for event in events if event.startswith("take")] == ["take 0"] * 3


class MovedClock(RecordingTrainer):
    """Sets the machine's clock back by an hour in every update."""

    def __init__(self, events):
        super().__init__(events)
        self.true = time.time

    async def update(self, payloads, version):
        time.time = lambda: self.true() - 3600.0 * (version + 1)
        return await super().update(payloads, version)


@pytest.mark.parametrize("trainer", [RecordingTrainer, MovedClock])
def test_statistics_carry_ordered_times_whatever_the_clock_of_the_machine_does(
    monkeypatch, trainer
):
    monkeypatch.setattr(time, "time", time.time)  # and back at the end
    _, queue, *_ = run([BATCH, BATCH], trainer=trainer)
    names = ["wait_started", "wait_finished", "step_started", "step_finished", "published"]
    times = [queue.acknowledged[0][f"{name}_at"] for name in ["session_started", *names]]
    assert times == sorted(times)
    assert queue.acknowledged[0]["loss"] == 0.5
    assert queue.acknowledged[1]["weights_checksum"] == "weights of 2", "what the batch produced"
    began = {row["session_started_at"] for row in queue.acknowledged.values()}
    assert len(began) == 1, "one session"


def test_a_batch_that_was_trained_before_is_not_observed_again():
    observed = []
    run([BATCH, BATCH], recorded=[0], observe=observed.append)
    assert [batch.version for batch in observed] == [1]


def test_totals_go_on_from_those_of_the_checkpoint_and_into_the_next():
    _, queue, _, trainer = run(
        [BATCH, BATCH], steps=9, start_version=7, totals={"rollouts": 50, "tokens": 1000}
    )
    assert queue.acknowledged[7]["totals"] == {"rollouts": 58, "tokens": 1107}
    assert queue.acknowledged[8]["totals"] == {"rollouts": 66, "tokens": 1215}
    assert trainer.saved == [(9, "prompt 9", {"rollouts": 66, "tokens": 1215})]


@pytest.mark.parametrize(("steps", "saved"), [(5, [2, 4, 5]), (2, [2])])
def test_checkpoints_are_saved_at_their_interval_and_once_at_the_end(steps, saved):
    events, *_ = run([BATCH] * steps, steps=steps, checkpoint_every=2)
    assert [event for event in events if event.startswith("save")] == [f"save {v}" for v in saved]


def test_a_closed_queue_ends_the_run_with_a_checkpoint():
    events, _, reached, _ = run([BATCH], steps=9)
    assert reached == 1
    assert events[-4:-1] == ["take 1", "save 1", "commit 1 at checkpoints/v000001"]


def test_a_resumed_run_removes_what_was_never_committed_and_goes_on_from_its_version():
    events, _, reached, _ = run([BATCH], steps=8, start_version=7)
    assert events[:4] == ["prune 7", "publish 7", "take 7", "update 7 with 2"]
    assert reached == 8


def test_nothing_left_to_train_publishes_and_ends():
    events, _, reached, _ = run([], steps=3, start_version=3)
    assert (events, reached) == (["prune 3", "publish 3"], 3)


def test_stop_ends_the_run_before_the_next_batch():
    stop = asyncio.Event()
    stop.set()
    events, _, reached, _ = run([BATCH], stop=stop)
    assert (events, reached) == (["prune 0", "publish 0"], 0)


def test_a_failed_update_leaves_the_batch_unacknowledged():
    events = []

    class Failing(RecordingTrainer):
        async def update(self, payloads, version):
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        run([BATCH], trainer=Failing, events=events)
    assert events == ["prune 0", "publish 0", "take 0"]


class SlowDigest(RecordingTrainer):
    """Knows the checksum of version 1 only when the engines have its weights, or never."""

    failure = None

    async def publish(self, version):
        self.events.append(f"publish {version}")
        return self.digest(version)

    async def digest(self, version):
        self.events.append(f"checksum {version}")
        if version and self.failure is not None:
            raise self.failure
        return f"weights of {version}"


class BrokenDigest(SlowDigest):
    failure = OSError("a bad page")


def test_the_acknowledgement_waits_for_the_checksum_and_publishing_does_not():
    events, queue, *_ = run([BATCH], trainer=SlowDigest, steps=1)
    assert events[5:8] == ["publish 1", "checksum 1", "ack 0"]
    assert queue.acknowledged[0]["weights_checksum"] == "weights of 1"


def test_a_checksum_that_fails_ends_training_without_an_acknowledgement():
    events = []
    with pytest.raises(OSError, match="a bad page"):
        run([BATCH], trainer=BrokenDigest, events=events)
    assert events[-2:] == ["publish 1", "checksum 1"]


class SlowWriter(RecordingTrainer):
    """Writes a checkpoint only when the test lets it, or fails to."""

    def __init__(self, events):
        super().__init__(events)
        self.writable = {version: asyncio.Event() for version in range(9)}
        self.failure = None

    async def update(self, payloads, version):
        report = await super().update(payloads, version)
        if version == 1:
            await asyncio.sleep(0)
            self.writable[1].set()
        return report

    async def write(self, version):
        await self.writable[version].wait()
        if self.failure is not None:
            raise self.failure
        self.events.append(f"written {version}")
        return await super().write(version)


class Unwritable(SlowWriter):
    def __init__(self, events):
        super().__init__(events)
        self.failure = OSError("gone")


def test_a_checkpoint_is_written_while_the_next_batch_is_trained_and_committed_when_whole():
    trainers = []

    def trainer(events):
        trainers.append(SlowWriter(events))
        trainers[0].writable[2].set()
        return trainers[0]

    events, *_ = run([BATCH, BATCH], trainer=trainer, checkpoint_every=1)
    order = [
        "save 1", "update 1 with 2", "written 1", "commit 1 at checkpoints/v000001", "prune 1",
        "save 2", "written 2", "commit 2 at checkpoints/v000002", "prune 2",
    ]  # fmt: skip
    assert [event for event in events if event in order] == order


def test_a_checkpoint_that_cannot_be_written_ends_training_without_a_commit():
    events = []
    answers = [BATCH, BATCH, None, BATCH]
    with pytest.raises(OSError, match="gone"):
        run(answers, trainer=Unwritable, events=events, steps=9, checkpoint_every=1)
    assert not [event for event in events if event.startswith("commit")]
    assert "save 2" not in events

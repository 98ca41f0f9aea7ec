"""The loop: the order of its calls, resuming, stopping, checkpoints."""

import asyncio

import pytest
import torch
from rollouts import random_groups

from learner.learner import Learner
from queues.errors import QueueClosed
from queues.records import Batch
from queues.schema import encode


class ScriptedQueue:
    """Answers from a list: a batch, None (a timeout) or QueueClosed; records calls."""

    def __init__(self, events, answers):
        self.events = events
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

    async def commit_checkpoint(self, version, path):
        raise AssertionError("the injected callable commits")


class RecordingTrainer:
    """Pretends to train; records calls."""

    def __init__(self, events):
        self.events = events

    def update(self, groups, version):
        self.events.append(f"update {version} with {len(groups)}")
        return {"loss": 0.5}

    def weights(self):
        yield "w", torch.zeros(1)


BATCH = Batch(version=0, payloads=[encode(item) for item in random_groups(count=2)])


def run(answers, *, stop=None, **settings):
    """The events in order, the queue, and the version reached."""
    events = []
    queue = ScriptedQueue(events, answers)

    def publish(version, tensors):
        events.append(f"publish {version} of {[name for name, _ in tensors]}")

    async def save(version):
        events.append(f"save {version}")

    async def main():
        learner = Learner(
            RecordingTrainer(events),
            queue,
            publish,
            **{"steps": 2, "save": save, "checkpoint_every": 10, **settings},
        )
        return await learner.run(stop)

    reached = asyncio.run(main())
    return events, queue, reached


def test_the_initial_weights_are_published_first_and_every_version_before_its_batch_is_acked():
    events, _, reached = run([BATCH, BATCH])
    assert events == [
        "publish 0 of ['w']",
        "take 0",
        "update 0 with 2",
        "publish 1 of ['w']",
        "ack 0",
        "take 1",
        "update 1 with 2",
        "publish 2 of ['w']",
        "ack 1",
        "save 2",
    ]
    assert reached == 2


def test_a_timeout_asks_for_the_same_version_again():
    events, _, _ = run([None, None, BATCH], steps=1)
    assert [event for event in events if event.startswith("take")] == ["take 0"] * 3


def test_statistics_carry_ordered_wall_clock_times():
    _, queue, _ = run([BATCH], steps=1)
    names = ["wait_started", "wait_finished", "step_started", "step_finished", "published"]
    times = [queue.acknowledged[0][f"{name}_at"] for name in names]
    assert times == sorted(times)
    assert times[0] > 1.7e9
    assert queue.acknowledged[0]["loss"] == 0.5


def test_checkpoints_come_every_so_many_batches_after_the_ack_and_once_at_the_end():
    events, _, _ = run([BATCH] * 5, steps=5, checkpoint_every=2)
    assert [event for event in events if event.startswith("save")] == ["save 2", "save 4", "save 5"]
    assert events.index("save 2") == events.index("ack 1") + 1


def test_the_last_checkpoint_is_not_written_twice():
    events, _, _ = run([BATCH] * 2, checkpoint_every=2)
    assert events.count("save 2") == 1


def test_a_closed_queue_ends_the_run_with_a_checkpoint():
    events, _, reached = run([BATCH], steps=9)
    assert reached == 1
    assert events[-2:] == ["take 1", "save 1"]


def test_a_resumed_run_goes_on_from_its_version():
    events, _, reached = run([BATCH], steps=8, start_version=7)
    assert events[:3] == ["publish 7 of ['w']", "take 7", "update 7 with 2"]
    assert reached == 8


def test_nothing_left_to_train_publishes_and_ends():
    events, _, reached = run([], steps=3, start_version=3)
    assert (events, reached) == (["publish 3 of ['w']"], 3)


def test_stop_ends_the_run_before_the_next_batch():
    async def main():
        stop = asyncio.Event()
        stop.set()
        return stop

    events, _, reached = run([BATCH], stop=asyncio.run(main()))
    assert (events, reached) == (["publish 0 of ['w']"], 0)


def test_a_failed_update_leaves_the_batch_unacknowledged():
    class Failing(RecordingTrainer):
        def update(self, groups, version):
            raise RuntimeError("out of memory")

    events = []
    queue = ScriptedQueue(events, [BATCH])

    async def save(version):
        events.append("save")

    learner = Learner(
        Failing(events), queue, lambda *_: None, steps=1, save=save, checkpoint_every=1
    )
    with pytest.raises(RuntimeError, match="out of memory"):
        asyncio.run(learner.run())
    assert events == ["take 0"]

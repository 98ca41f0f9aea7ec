"""A worker that only evaluates stays at a version until it is done, while others train on."""

import asyncio
import logging
from dataclasses import dataclass, field

import pytest
from fakes import Desk, lease, make_worker, open_broker, rollout, scripted_worker, sums, working

from actors.errors import RolloutFailed
from queues.errors import QueueClosed
from queues.records import Purpose

BATCH, SIZE, STEPS, PROBLEMS = 2, 2, 9, 7


@dataclass
class Published:
    """The newest version; whoever follows takes that and none between."""

    version: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def publish(self, version):
        async with self.changed:
            self.version = version
            self.changed.notify_all()

    async def follow(self, engine, worker):
        """As a receiver does: the next version is taken when `on_version` has returned."""
        served = -1
        while served < STEPS:
            async with self.changed:
                while self.version <= served:
                    await self.changed.wait()
                served = self.version
            engine.version = served
            await worker.on_version(served)


@pytest.mark.parametrize("failures", [0, 2])
async def test_every_rollout_of_an_evaluation_is_of_one_version_while_training_goes_on(
    tmp_path, failures
):
    planned = {"early": 0, "greedy": 2, "sampled": 2, "late": 5, "last": STEPS}
    of_evaluation = {name: [] for name in planned}
    behind = []

    broker = open_broker(tmp_path, batch=BATCH, size=SIZE, steps=STEPS)
    published = Published()

    async def episode(run, of, sample, saved):
        if of.purpose is Purpose.TRAIN:
            return await run(of, sample, saved)
        if of.attempt <= failures:
            raise RolloutFailed("not yet")
        made = await run(of, sample, saved)
        versions = {version for version in made.versions if version >= 0}
        behind.append(published.version - max(versions))
        of_evaluation[of.prompt.prompt_id.split("/")[0]].append(versions)
        return made

    actors = [
        await scripted_worker(broker, f"engine-{i}", run=episode, purpose=purpose, **speed)
        for i, (purpose, speed) in enumerate(
            ((Purpose.TRAIN, {}), (Purpose.EVALUATE, {"tokens_per_second": 120.0}))
        )
    ]

    async def learn():
        for version in range(STEPS):
            assert await broker.take(version, 10.0) is not None
            await broker.ack(version, {})
            await published.publish(version + 1)

    await broker.issue(sums(BATCH * STEPS, "train"), cursor="{}")
    for name, version in planned.items():
        await broker.evaluate(name, sums(PROBLEMS, name), temperature=0.0, min_version=version)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(learn())
        for engine, worker in actors:
            tasks.create_task(worker.run(asyncio.Event()))
            tasks.create_task(published.follow(engine, worker))
    accounts = await broker.accounting()
    outcomes = {name: await broker.evaluation(name, 1.0) for name in planned}
    await broker.close()
    assert accounts.balanced
    assert accounts.trained == BATCH * STEPS
    for name, at_least in planned.items():
        (versions,) = {frozenset(result) for result in of_evaluation[name]}
        (version,) = versions
        assert version >= at_least
        assert len(of_evaluation[name]) == PROBLEMS
        result = outcomes[name]
        assert (result.lowest_version, result.highest_version) == (version, version)
        assert (result.count, result.failed) == (PROBLEMS, 0)
    assert of_evaluation["early"][0] == {0}
    assert of_evaluation["last"][0] == {STEPS}
    assert max(behind) >= 1, "batches were trained while an older version was evaluated"


async def test_what_fails_while_a_lease_is_asked_for_is_evaluated_before_the_next_version():
    class Slow(Desk):
        """Its second answer finds nothing, and arrives when the group of the first has failed."""

        async def lease(self, engine_id, limit, timeout, purpose=None):
            if len(self.of("lease")) != 1:
                return await super().lease(engine_id, limit, timeout, purpose)
            await self.note("lease", limit)
            failing.set()
            while worker.held:  # noqa: ASYNC110
                await asyncio.sleep(0)
            self.leases.append(lease("one", size=1, attempt=2))
            return []

    async def episode(of, sample, saved):
        if of.attempt == 1:
            await failing.wait()
            raise RolloutFailed("for once")
        return rollout(of, sample)

    failing, desk = asyncio.Event(), Slow(lease("one", size=1))
    worker = evaluator(desk, episode)
    async with working(worker):
        await worker.on_version(0)
        assert (len(desk.of("fail")), len(desk.of("put"))) == (1, 1)


async def test_what_is_leased_is_for_the_purpose_that_was_asked_for(tmp_path):
    broker = open_broker(tmp_path, batch=BATCH, size=SIZE, steps=STEPS)
    await broker.issue(sums(2, "train"), cursor="{}")
    await broker.evaluate("held", sums(2, "held"), temperature=0.0, min_version=0)
    await broker.serving("engine-0", 0)
    purposes = [
        [lease.purpose for lease in await broker.lease("engine-0", limit, 0.0, purpose)]
        for limit, purpose in ((2, Purpose.TRAIN), (1, Purpose.EVALUATE), (9, None))
    ]
    await broker.close()
    train, evaluate = Purpose.TRAIN, Purpose.EVALUATE
    assert purposes == [[train], [evaluate], [evaluate, train]]


def evaluator(desk, episode, *, pinned_seconds=60.0):
    purpose = Purpose.EVALUATE
    return make_worker(desk, episode, purpose=purpose, pinned_seconds=pinned_seconds)


async def test_a_version_with_nothing_to_evaluate_is_left_at_once():
    desk = Desk()
    worker = evaluator(desk, None)
    async with working(worker):
        await worker.on_version(0)
    assert desk.events[:2] == [("serving", 0), ("lease", 4)]


async def test_an_evaluation_that_takes_too_long_keeps_no_version_for_ever(caplog):
    ended, desk = asyncio.Event(), Desk(lease("slow", size=1))

    async def episode(of, sample, saved):
        await ended.wait()
        return rollout(of, sample)

    worker = evaluator(desk, episode, pinned_seconds=0.05)
    with caplog.at_level(logging.WARNING):
        async with working(worker):
            await worker.on_version(0)
            assert desk.of("put") == []
            ended.set()
            await worker.on_version(1)
            assert len(desk.of("put")) == 1
    assert "has evaluated version 0 for heldout.pinned_seconds = 0.05" in caplog.text


@pytest.mark.parametrize("method", ["lease", "put"])
async def test_the_end_of_the_run_lets_whoever_waits_go(method):
    desk = Desk(lease("one", size=1))
    desk.errors[method] = QueueClosed("the run is over")

    worker = evaluator(desk, lambda of, sample, saved: asyncio.sleep(0, rollout(of, sample)))
    async with working(worker):
        await worker.on_version(0)
    assert worker.left.is_set()

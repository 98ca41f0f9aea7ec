"""The worker's loop: against a broker that records every call, and against the real one."""

import asyncio
import contextlib
from dataclasses import replace

import pytest
from fakes import Desk, lease, make_worker, open_broker, rollout, scripted_worker, sums, working

from actors.errors import EngineDied, Excused, RewardFailed, RolloutFailed
from actors.rollout.actor_statistics import Occupancy
from headway.errors import InputError
from queues.errors import BrokerLostError, QueueClosed
from queues.records import FinishReason, Purpose, RolloutGroup
from queues.schema import decode, encode


class Stage:
    """Episodes that end when they are told to."""

    def __init__(self):
        self.begun, self.ended, self.aborted = [], asyncio.Event(), []
        self.errors = {}
        self.temperatures = []
        self.rewards = {}
        """By index; 1 where none is given."""
        self.interrupted = False
        self.saved = {}
        """Rollouts of an earlier attempt that an episode was given, by index."""

    async def run(self, of, index, saved):
        self.begun.append((of.group_id, index))
        self.temperatures.append(of.temperature)
        if error := self.errors.get((of.group_id, index)):
            raise error
        self.saved[index] = saved
        try:
            await self.ended.wait()
        except asyncio.CancelledError:
            self.aborted.append((of.group_id, index))
            raise
        reward = self.rewards.get(index, 1.0)
        return replace(
            rollout(of, index), reward=reward, turns=index + 1,
            finish_reason=FinishReason.ABORTED if self.interrupted else FinishReason.STOP,
        )  # fmt: skip

    async def interrupt(self):
        self.interrupted = True
        self.ended.set()


def build(desk, stage, *, run=None, **settings):
    return make_worker(desk, run or stage.run, interrupt=stage.interrupt, **settings)


@contextlib.asynccontextmanager
async def at_work(desk, stage, *, version=0, **settings):
    """Run a worker whose engine serves a version, as `working` does."""
    worker = build(desk, stage, **settings)
    async with working(worker):
        await worker.on_version(version)
        yield worker


async def test_nothing_is_leased_before_the_first_weights():
    desk = Desk(lease())
    worker = build(desk, Stage())
    async with working(worker):
        for _ in range(20):
            await asyncio.sleep(0)
        assert desk.events == []
        await worker.on_version(0)
        await desk.until(lambda events: ("lease", 4) in events)
    assert desk.events[0] == ("serving", 0)
    assert worker.statistics.statistics()["idle_seconds"]["first_weights"] > 0


async def test_a_group_runs_all_its_rollouts_at_once_and_is_put_once():
    desk, stage = Desk(lease("g1", size=2, attempt=3)), Stage()
    async with at_work(desk, stage, version=3) as worker:
        await desk.until(lambda events: len(events) > 3)
        assert stage.begun == [("g1", 0), ("g1", 1)]
        assert worker.statistics.statistics()["running_rollouts"] == 2
        stage.ended.set()
        await desk.until(lambda events: desk.of("put"))
    [(payload,)] = desk.of("put")
    group = decode(payload)
    assert (group.group_id, group.prompt_id, group.attempt) == ("g1", "sums/0/1", 3)
    assert [r.sample_index for r in group.rollouts] == [0, 1]
    statistics = worker.statistics.statistics()
    assert statistics["tokens_generated"] == 4
    assert statistics["rollouts"] == 2
    assert statistics["groups"] == {"accepted": 1}
    assert statistics["running_rollouts"] == 0
    assert statistics["version"] == 3


async def test_a_greedy_rollout_runs_beside_the_group_and_only_its_reward_is_put():
    desk, stage = Desk(lease("g1", size=2, greedy_baseline=True)), Stage()
    stage.rewards = {0: 0.0, 1: 1.0, 2: 0.25}
    async with at_work(desk, stage, slots=6, size=3, version=3) as worker:
        await desk.until(lambda events: len(events) > 3)
        assert stage.begun == [("g1", 0), ("g1", 1), ("g1", 2)]
        assert stage.temperatures == [None, None, 0.0]
        assert worker.statistics.statistics()["running_rollouts"] == 3
        stage.ended.set()
        await desk.until(lambda events: desk.of("put"))
    group = decode(desk.of("put")[0][0])
    assert [r.sample_index for r in group.rollouts] == [0, 1]
    assert [r.reward for r in group.rollouts] == [0.0, 1.0]
    assert [r.baseline_reward for r in group.rollouts] == [0.25, 0.25]
    assert [r.turns for r in group.rollouts] == [1, 2], "nothing else is lost"
    assert worker.statistics.statistics()["rollouts"] == 3
    assert worker.statistics.statistics()["running_rollouts"] == 0


async def test_leases_are_asked_for_as_many_rollouts_as_have_room():
    desk, stage = Desk(*(lease(f"g{i}") for i in range(5))), Stage()
    async with at_work(desk, stage, slots=7, size=2):
        await desk.until(lambda events: desk.of("lease"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert desk.of("lease") == [(7,)]
        assert len(stage.begun) == 6
        stage.ended.set()
        await desk.until(lambda events: len(desk.of("put")) == 5)
    assert all(2 <= limit <= 7 for (limit,) in desk.of("lease"))


async def test_a_rollout_that_has_ended_makes_room_before_its_group_has():
    desk, stage = Desk(lease("g1", size=2), lease("g2", size=2)), Stage()
    straggler = asyncio.Event()

    async def run(of, index, saved):
        if index == 1:
            await straggler.wait()
        return await stage.run(of, index, saved)

    stage.ended.set()
    async with at_work(desk, stage, slots=4, size=2, run=run) as worker:
        # Both groups have a rollout that has ended: there is room for a third.
        await desk.until(lambda _: worker.statistics.statistics()["running_rollouts"] == 2)
        await desk.until(lambda events: events.count(("lease", 2)) == 1)
        assert desk.of("put") == []
        straggler.set()
        await desk.until(lambda _: len(desk.of("put")) == 2)
        assert worker.statistics.statistics()["running_rollouts"] == 0


@pytest.mark.parametrize(("baseline", "failed"), [(False, 1), (True, 3)])
async def test_siblings_of_a_failed_rollout_or_baseline_end_and_are_saved_with_its_failure(
    baseline, failed
):
    bad = lease("bad", size=3, greedy_baseline=baseline)
    desk, stage = Desk(bad, lease("good", size=3)), Stage()
    stage.errors["bad", failed] = RewardFailed("reward 'x' of prompt 'sums/0/1' raised")
    async with at_work(desk, stage, slots=20, size=4) as worker:
        await desk.until(lambda _: len(stage.begun) == 6 + baseline)
        assert desk.of("fail") == []
        stage.ended.set()
        await desk.until(lambda events: desk.of("put") and desk.of("fail"))
    assert desk.of("fail") == [("bad", 1, "reward", "reward 'x' of prompt 'sums/0/1' raised")]
    assert stage.aborted == []
    [(saved,)] = desk.of("save")
    others = [index for index in range(3) if index != failed]
    assert [r.sample_index for r in decode(saved).rollouts] == others
    assert {r.finish_reason for r in decode(saved).rollouts} == {FinishReason.STOP}
    assert desk.events.index(("save", saved)) < desk.events.index(("fail", *desk.of("fail")[0]))
    assert [decode(payload).group_id for (payload,) in desk.of("put")] == ["good"]
    assert worker.statistics.statistics()["groups"] == {"failed": 1, "accepted": 1}


async def test_a_failure_that_counts_is_the_one_of_its_group_beside_one_that_does_not():
    desk, stage = Desk(lease("g1", size=2)), Stage()
    stage.errors = {("g1", 0): Excused("a process was killed"), ("g1", 1): RewardFailed("raised")}
    async with at_work(desk, stage):
        await desk.until(lambda events: desk.of("fail"))
    assert desk.of("fail") == [("g1", 1, "reward", "raised")]


async def test_a_rollout_that_the_schema_refuses_fails_its_group():
    desk = Desk(lease("odd", size=1))

    async def episode(of, index, saved):
        return rollout(of, index, version=-5)

    async with at_work(desk, Stage(), run=episode):
        await desk.until(lambda events: desk.of("fail"))
    [(group_id, attempt, reason, error)] = desk.of("fail")
    assert (group_id, attempt, reason) == ("odd", 1, "schema")
    assert error.startswith("versions: ")
    assert desk.of("put") == []


@pytest.mark.parametrize("fails", [False, True])
async def test_a_group_is_scored_as_a_whole_with_its_baseline_or_saved_for_another_attempt(fails):
    desk, stage = Desk(lease("g1", size=2, greedy_baseline=True)), Stage()
    stage.rewards = {0: 1.0, 1: 2.0, 2: 4.0}

    async def score_group(of, rollouts):
        if fails:
            raise RewardFailed("the judge gave no mark")
        total = sum(r.reward for r in rollouts)
        return [replace(r, reward=r.reward / total) for r in rollouts]

    async with at_work(desk, stage, score_group=score_group):
        stage.ended.set()
        await desk.until(lambda events: desk.of("fail" if fails else "put"))
    [(payload,)] = desk.of("save" if fails else "put")
    scored = [(r.reward, r.baseline_reward) for r in decode(payload).rollouts]
    assert scored == ([(1.0, None), (2.0, None)] if fails else [(1 / 7, 4 / 7), (2 / 7, 4 / 7)])


@pytest.mark.parametrize("group", ["lost", "kept"])
async def test_heartbeats_renew_what_is_held_and_abort_a_lost_group_or_attempt(group):
    """The lost attempt may be an older one of a group of which a newer one is kept."""
    desk, stage = Desk(lease("kept", attempt=2), lease(group, attempt=1)), Stage()
    async with at_work(desk, stage, heartbeat=0.01) as worker:
        await desk.until(lambda events: desk.of("heartbeat"))
        assert desk.of("heartbeat")[0] == (sorted([("kept", 2), (group, 1)]),)
        desk.lost = [(group, 1)]
        await desk.until(lambda events: ("heartbeat", [("kept", 2)]) in events)
        assert sorted(stage.aborted) == [(group, 0), (group, 1)]
        stage.ended.set()
        await desk.until(lambda events: desk.of("put"))
    assert desk.of("fail") == []
    assert worker.statistics.statistics()["groups"] == {"aborted": 1, "accepted": 1}


@pytest.mark.parametrize("baseline", [False, True])
async def test_stop_interrupts_what_is_running_and_saves_what_was_sampled(baseline):
    """A baseline is sampled anew: one that was interrupted is never a reward of zero."""
    desk, stage = Desk(lease("g1", attempt=2, greedy_baseline=baseline)), Stage()
    async with at_work(desk, stage, slots=6, size=2 + baseline) as worker:
        await desk.until(lambda events: len(events) > 3)
    assert desk.of("put") == desk.of("fail") == stage.aborted == []
    group = decode(desk.of("save")[0][0])
    assert (group.group_id, group.attempt) == ("g1", 2)
    assert [r.sample_index for r in group.rollouts] == [0, 1]
    assert {r.finish_reason for r in group.rollouts} == {FinishReason.ABORTED}
    assert worker.statistics.statistics()["groups"] == {"aborted": 1}
    assert worker.statistics.statistics()["rollouts"] == 0


async def test_stop_interrupts_what_is_running_though_the_broker_is_made_again():
    desk, stage = Desk(lease("g1")), Stage()
    async with at_work(desk, stage, version=3):
        await desk.until(lambda events: len(stage.begun) == 2)
        desk.lease = lambda *_: asyncio.Event().wait()
        await asyncio.sleep(0)
    assert stage.interrupted


async def test_a_rollout_that_fails_as_stop_interrupts_it_is_no_failed_attempt():
    """Its group is left to whoever leases it next."""

    class Talking(Stage):
        async def run(self, of, index, saved):
            await super().run(of, index, saved)
            raise RolloutFailed("request g1/1/0/2 ended as error after 3 tokens")

    desk, stage = Desk(lease("g1")), Talking()
    async with at_work(desk, stage) as worker:
        await desk.until(lambda events: len(events) > 3)
    assert desk.of("put") == desk.of("fail") == desk.of("save") == []
    assert worker.statistics.statistics()["groups"] == {"aborted": 1}


async def test_rollouts_that_nobody_was_to_interrupt_fail_their_group():
    desk, stage = Desk(lease("g1")), Stage()
    async with at_work(desk, stage):
        await desk.until(lambda events: len(events) > 3)
        await stage.interrupt()
        await desk.until(lambda events: desk.of("fail"))
    [(group_id, _, reason, error)] = desk.of("fail")
    assert (group_id, reason, "aborted by the engine" in error) == ("g1", "engine", True)
    assert desk.of("save") == []


class Uneven(Stage):
    """The rollout 0 of each group ends at once."""

    async def run(self, of, index, saved):
        if index == 0:
            self.begun.append((of.group_id, index))
            return rollout(of, index)
        return await super().run(of, index, saved)


async def test_rollouts_that_finished_before_their_group_are_saved_with_the_heartbeat_once():
    desk, stage = Desk(lease("g1"), lease("e1", size=1)), Uneven()
    desk.leases[1] = replace(desk.leases[1], purpose=Purpose.EVALUATE)
    async with at_work(desk, stage, heartbeat=0.005):
        await desk.until(lambda events: len(desk.of("heartbeat")) > 4)
        assert len(desk.of("save")) == 1
        stage.ended.set()
        await desk.until(lambda events: len(desk.of("put")) == 2)
    [saved] = decode(desk.of("save")[0][0]).rollouts
    assert (saved.sample_index, saved.finish_reason) == (0, FinishReason.STOP)


async def test_a_lease_that_carries_saved_rollouts_samples_only_what_is_missing():
    first = lease("g1", size=3)
    finished = replace(rollout(first, 0), reward=0.25)
    begun = replace(rollout(first, 2), finish_reason=FinishReason.ABORTED, reward=0.0)
    saved = encode(
        RolloutGroup(group_id="g1", prompt_id="sums/0/1", attempt=1, rollouts=[finished, begun])
    )

    desk, stage = Desk(replace(first, attempt=2, saved=saved)), Stage()
    stage.ended.set()
    async with at_work(desk, stage, slots=3, size=3, version=5) as worker:
        await desk.until(lambda events: desk.of("put"))
    assert stage.begun == [("g1", 1), ("g1", 2)]
    assert stage.saved[1] is None
    assert (stage.saved[2].sample_index, stage.saved[2].versions) == (2, begun.versions)
    group = decode(desk.of("put")[0][0])
    assert group.attempt == 2
    assert [r.reward for r in group.rollouts] == [0.25, 1.0, 1.0]
    assert worker.statistics.statistics()["tokens_generated"] == 2, (
        "of rollout 1; the others had theirs"
    )


@pytest.mark.parametrize("method", ["lease", "put", "heartbeat"])
async def test_the_end_of_the_run_ends_the_worker_without_an_error(method):
    desk, stage = Desk(lease("g1")), Stage()
    desk.errors[method] = QueueClosed("the run is over")
    if method == "put":
        stage.ended.set()
    worker = build(desk, stage, heartbeat=0.01)
    await worker.on_version(0)
    async with asyncio.timeout(10):
        await worker.run(asyncio.Event())
    assert not desk.of("fail")


@pytest.mark.parametrize(
    "error", [EngineDied("gone"), ZeroDivisionError("a bug"), BrokerLostError("gone too")]
)
async def test_a_dead_engine_a_bug_or_a_lost_broker_ends_the_worker_with_that_error(error):
    desk, stage = Desk(lease("g1"), lease("g2")), Stage()
    stage.errors["g1", 0] = RewardFailed("less grave")
    if isinstance(error, BrokerLostError):
        desk.errors["lease"] = error
    else:
        stage.errors["g1", 1] = error
    worker = build(desk, stage)
    await worker.on_version(0)
    with pytest.raises(type(error), match=str(error)):
        async with asyncio.timeout(10):
            await worker.run(asyncio.Event())


def test_a_worker_without_room_for_one_group_is_refused():
    with pytest.raises(InputError, match="max_concurrent_rollouts = 4 must be at least"):
        build(None, Stage(), slots=4, size=8)


def test_occupancy_tells_waiting_for_weights_from_waiting_for_leases():
    now = [0.0]
    occupancy = Occupancy(clock=lambda: now[0])

    def wait(seconds):
        now[0] += seconds

    wait(5)
    occupancy.serve()
    wait(1)
    occupancy.change(+8)
    wait(2)
    occupancy.change(-4)
    wait(4)
    occupancy.change(-4)
    wait(3)
    occupancy.freeze()
    wait(100)
    occupancy.settle()
    assert occupancy.idle_seconds == {"first_weights": 5.0, "leases": 4.0}
    assert occupancy.serving_seconds == 10.0
    assert occupancy.idle_fraction == 0.4
    assert occupancy.mean_running == (8 * 2 + 4 * 4) / 10


async def test_what_comes_after_the_run_does_not_count_as_idle():
    async with at_work(Desk(), Stage()) as worker:
        pass
    after = worker.statistics.statistics()
    await asyncio.sleep(0)
    assert worker.statistics.statistics() == after


@pytest.mark.parametrize(("staleness", "baseline"), [(0, False), (2, False), (0, True), (2, True)])
async def test_workers_broker_and_learner_train_every_group_within_the_bound(
    tmp_path, staleness, baseline
):
    """Four batches end to end, in one process, with a version that moves while it generates."""
    batch, size, steps = 3, 2, 4
    trained, greedy, evaluated = [], [], []

    async def episode(run, of, index, saved):
        rollout = await run(of, index, saved)
        if of.purpose is not Purpose.TRAIN:
            evaluated.append(rollout)
        elif of.temperature == 0.0:
            greedy.append(rollout)
        return rollout

    broker = open_broker(
        tmp_path,
        batch=batch,
        size=size,
        steps=steps,
        staleness=staleness,
        greedy_baseline=baseline,
    )
    engine, worker = await scripted_worker(
        broker, run=episode, slots=6, size=size + baseline, length_sigma=0.7
    )

    async def learn():
        for version in range(steps):
            taken = await broker.take(version, 10.0)
            trained.extend((version, decode(payload)) for payload in taken.payloads)
            engine.version = version + 1
            await worker.on_version(version + 1)
            await broker.ack(version, {})

    await broker.issue(sums(12), cursor="{}")
    await broker.evaluate("greedy", sums(5), temperature=0.0, min_version=0)
    await worker.on_version(0)
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        tasks.create_task(learn())
        tasks.create_task(worker.run(asyncio.Event()))
    accounts, evaluation = await broker.accounting(), await broker.evaluation("greedy", 1.0)
    await broker.close()
    statistics = worker.statistics.statistics()
    assert (accounts.trained, accounts.balanced) == (batch * steps, True)
    assert (evaluation.count, evaluation.failed) == (5, 0)
    assert statistics["groups"] == {"accepted": batch * steps + 5}
    assert sorted(g.prompt_id for _, g in trained) == sorted(f"sums/0/{i}" for i in range(12))
    for version, group in trained:
        assert [r.sample_index for r in group.rollouts] == [0, 1]
        sampled = [v for r in group.rollouts for v in r.versions if v >= 0]
        assert version - min(sampled) <= staleness
    rollouts = [r for _, group in trained for r in group.rollouts]
    assert [rollout.sample_index for rollout in greedy] == [size] * batch * steps * baseline
    assert {r.baseline_reward for r in rollouts} == (
        {rollout.reward for rollout in greedy} if baseline else {None}
    )
    tokens = sum(sum(r.loss_mask) for r in (*rollouts, *greedy, *evaluated))
    assert statistics["tokens_generated"] == tokens


async def test_what_a_worker_has_sampled_when_it_is_stopped_is_gone_on_with_by_another(tmp_path):
    """Tokens, log-probabilities and versions stay; the group starts at the oldest of them."""
    broker = open_broker(tmp_path)
    await broker.issue(sums(1), cursor="1")
    speed = {"median_length": 50, "tokens_per_second": 100.0}
    _, first = await scripted_worker(broker, "first", slots=2, **speed)
    async with working(first):
        await first.on_version(0)
        await asyncio.sleep(0.15)
    saved = first.statistics.statistics()["tokens_generated"]
    await broker.close()
    broker = open_broker(tmp_path)
    [held] = broker.commits.state.groups.in_flight.values()
    assert held.saved == 0
    _, second = await scripted_worker(broker, "second", version=1, slots=2, median_length=50)
    async with working(second):
        await second.on_version(1)
        batch = await broker.take(0, 10.0)
    await broker.close()
    group = decode(batch.payloads[0])
    assert group.attempt == 2
    assert (held.start_version, held.due) == (0, 0), "taken into batch 0"
    assert 2 <= saved < 60
    assert saved + second.statistics.statistics()["tokens_generated"] == 60
    for continued in group.rollouts:
        own = [v for v in continued.versions if v >= 0]
        assert len(own) == 30
        assert own == sorted(own)
        assert set(own) == {0, 1}
        assert continued.finish_reason is FinishReason.LENGTH
        pairs = zip(continued.behavior_logprobs, continued.loss_mask, strict=True)
        assert all(logprob < 0 for logprob, sampled in pairs if sampled)

"""The broker's contract: one suite against `Broker` and against `BrokerClient` over Ray.

Over Ray all but a few tests are slow, for each starts a process.
"""

import asyncio
import contextlib

import pytest

from headway.errors import InputError
from queues.broker.broker import Broker
from queues.errors import ProtocolError, QueueClosed, SchemaError
from queues.records import Purpose, PutStatus
from queues.schema import decode
from tests.queues.conftest import (
    WAIT,
    answer,
    begin_work,
    make_prompts,
    opened,
    over_ray,
    put_all,
    train_a_batch,
)


async def generate(broker, groups, engine="a"):
    """Lease with room for this many train groups, and put a result for each."""
    for lease in await broker.lease(engine, 2 * groups, WAIT):
        assert await broker.put(engine, answer(lease)) is PutStatus.ACCEPTED


async def train(broker, version):
    assert await broker.take(version, WAIT) is not None
    await broker.ack(version, {"loss": 0.5})


async def feed(broker):
    """Issue what is wanted until nothing more is; returns how many."""
    issued = 0
    with contextlib.suppress(QueueClosed):
        while True:
            wanted = await broker.prompts_wanted(0.5)
            await broker.issue(make_prompts(wanted, issued), cursor=str(issued + wanted))
            issued += wanted
    return issued


async def work(broker):
    """Put a result for every lease until the run is over; returns start and deadline of each."""
    leased = []
    with contextlib.suppress(QueueClosed):
        while True:
            for lease in await broker.lease("a", 4, 0.5):
                leased.append((lease.start_version, lease.deadline_version))
                await broker.put("a", answer(lease))
    return leased


async def learn(broker, steps):
    """Train every batch; returns the group ids of each."""
    batches = []
    await broker.serving("a", 0)
    for version in range(steps):
        batch = await broker.take(version, WAIT)
        batches.append([decode(payload).group_id for payload in batch.payloads])
        await broker.serving("a", version + 1)
        await broker.ack(version, {"loss": 0.5})
    with pytest.raises(QueueClosed):
        await broker.take(steps, WAIT)
    return batches


@over_ray
async def test_a_run_trains_every_step_from_prompts_to_acknowledgement(connect):
    async with opened(connect()) as broker:
        issued, leased, batches = await asyncio.gather(feed(broker), work(broker), learn(broker, 3))
        assert issued == 6
        assert len(leased) == 6
        assert all(deadline == start + 1 for start, deadline in leased)
        assert sorted(group for batch in batches for group in batch) == [
            f"g{number:08d}" for number in range(1, 7)
        ]
        assert (await broker.accounting()).to_dict() == {
            "issued": 6, "queued": 0, "leased": 0, "ready": 0, "taken": 0, "trained": 6,
            "dropped": {}, "failed": {}, "heldout_failed": {}, "trained_twice": 0,
            "duplicates": 0, "balanced": True,
        }  # fmt: skip
        status = await broker.status(after=0)
        assert (status.version, status.steps, status.live, status.window) == (3, 3, 0, 0)
        assert [batch.version for batch in status.batches] == [1, 2]
        assert status.batches[0].statistics == {"loss": 0.5}


async def test_prompts_are_wanted_up_to_two_batches_and_never_beyond_the_last_step(connect):
    async with opened(connect()) as broker:
        assert await broker.prompts_wanted(0) == 4
        await broker.issue(make_prompts(4), cursor="4")
        assert await broker.cursor() == "4"
        assert await broker.prompts_wanted(0) == 0
        await broker.serving("a", 0)
        await generate(broker, 3)
        assert await broker.prompts_wanted(0) == 2, "6 groups are all that 3 steps can train"
        await broker.issue(make_prompts(2, 4), cursor="6")
        await generate(broker, 1)
        await train(broker, 0)
        assert await broker.prompts_wanted(0) == 0


async def test_an_engine_without_weights_leases_nothing(connect):
    async with opened(connect()) as broker:
        await broker.issue(make_prompts(4), cursor="4")
        assert await broker.lease("a", 8, 0.05) == []
        await broker.serving("a", 0)
        assert len(await broker.lease("a", 8, 0.05)) == 4


async def test_admission_bounds_what_is_live_and_an_update_opens_it(connect):
    async with opened(connect()) as broker:
        await begin_work(broker, 6)
        await generate(broker, 6)
        status = await broker.status()
        assert (status.live, status.window, status.depth["queued"]) == (4, 4, 2)
        waiting = asyncio.create_task(broker.lease("a", 12, WAIT))
        await train(broker, 0)
        await asyncio.sleep(0)
        assert not waiting.done(), "version 0 is now too old for any place that is left"
        await broker.serving("a", 1)
        assert [lease.start_version for lease in await waiting] == [1, 1]


async def test_the_learner_waits_for_the_group_that_is_due(connect):
    async with opened(connect()) as broker:
        straggler, *others = await begin_work(broker, 6, capacity=8)
        await put_all(broker, others[:2])
        await train(broker, 0)
        await broker.serving("a", 1)
        await put_all(broker, [others[2], *await broker.lease("a", 8, WAIT)])
        assert await broker.take(1, 0.05) is None
        assert (await broker.status()).waits_for == {straggler.group_id: "a"}
        late = asyncio.create_task(broker.take(1, WAIT))
        await broker.put("a", answer(straggler))
        batch = await late
        assert {decode(payload).group_id for payload in batch.payloads} == {
            straggler.group_id,
            others[2].group_id,
        }


@over_ray
async def test_take_is_idempotent_and_keeps_to_the_order_of_versions(connect):
    async with opened(connect()) as broker:
        await begin_work(broker, 4)
        await generate(broker, 4)
        first = await broker.take(0, WAIT)
        assert await broker.take(0, WAIT) == first
        for version in (1, -1):
            with pytest.raises(ProtocolError, match=f"batch {version}"):
                await broker.take(version, WAIT)
        with pytest.raises(ProtocolError, match="batch 1 is not taken"):
            await broker.ack(1, {})
        assert [await broker.ack(0, {}) for _ in range(2)] == [True, False]
        assert await broker.take(0, WAIT) == first, "a rollback trains the recorded batch again"
        assert (await broker.status()).version == 1


async def test_a_learner_that_was_made_again_fences_the_one_before(connect):
    async with opened(connect()) as broker:
        await train_a_batch(broker)
        assert (await broker.status()).learner == (0, 0)
        await broker.begin_learner(1)
        assert (await broker.status()).learner == (1, -1)
        calls = broker.take(0, 0.0), broker.ack(0, {}), broker.commit_checkpoint(1, "c/v1")
        for call in calls:
            with pytest.raises(ProtocolError, match="of epoch 0 calls, but that of epoch 1 goes"):
                await call
        present, epoch = broker, {"epoch": 1}
        if not isinstance(broker, Broker):
            present, epoch = broker.of_epoch(1), {}
        assert len((await present.take(0, WAIT, **epoch)).payloads) == 2
        await present.ack(0, {}, **epoch)
        await present.commit_checkpoint(1, "c/v1", **epoch)
        status = await broker.status()
        assert (status.learner, status.version) == ((1, 0), 1)


async def test_a_group_has_one_accepted_result_and_the_rest_is_counted(connect):
    async with opened(connect()) as broker:
        first, second = await begin_work(broker, 2, "a", "b", capacity=4)
        assert await broker.put("b", answer(first)) is PutStatus.FENCED
        assert await broker.put("a", answer(first)) is PutStatus.ACCEPTED
        assert await broker.put("a", answer(first)) is PutStatus.DUPLICATE
        await broker.fail("a", second.group_id, second.attempt, reason="reward", error="boom")
        assert await broker.put("a", answer(second)) is PutStatus.FENCED
        (again,) = await broker.lease("b", 4, WAIT)
        assert (again.group_id, again.attempt) == (second.group_id, 2)
        assert await broker.put("a", answer(second)) is PutStatus.FENCED
        assert await broker.put("b", answer(again)) is PutStatus.ACCEPTED
        await train(broker, 0)
        assert await broker.put("a", answer(first)) is PutStatus.DUPLICATE
        accounting = await broker.accounting()
        assert (accounting.trained, accounting.duplicates, accounting.balanced) == (2, 5, True)


async def test_a_result_that_was_not_leased_is_refused_and_the_lease_stays(connect):
    async with opened(connect()) as broker:
        await broker.issue(make_prompts(1), cursor="1")
        await broker.serving("a", 1)
        (lease,) = await broker.lease("a", 2, WAIT)
        with pytest.raises(SchemaError, match=r"versions: a token .* is of version 0"):
            await broker.put("a", answer(lease, version=0))
        with pytest.raises(SchemaError, match="payload: not an Arrow IPC stream"):
            await broker.put("a", b"nonsense")
        assert await broker.put("a", answer(lease)) is PutStatus.ACCEPTED


async def test_a_failed_group_goes_to_the_front_and_fails_after_its_attempts(connect):
    async with opened(connect()) as broker:
        first, *_ = await begin_work(broker, 3, capacity=4)
        await broker.fail("a", first.group_id, 1, reason="timeout", error="too long")
        await broker.fail("a", first.group_id, 1, reason="timeout", error="too long")
        (again,) = await broker.lease("a", 2, WAIT)
        assert (again.group_id, again.attempt) == (first.group_id, 2)
        await broker.fail("a", first.group_id, 2, reason="timeout", error="too long")
        accounting = await broker.accounting()
        assert accounting.failed == {"timeout": 1}
        assert (accounting.queued, accounting.leased, accounting.balanced) == (1, 1, True)


@over_ray
async def test_a_released_engine_loses_its_leases_at_once_and_must_report_its_version_again(
    connect,
):
    async with opened(connect(max_staleness=2)) as broker:
        done, lost = await begin_work(broker, 5, "a", "b", capacity=4)
        (other,) = await broker.lease("b", 2, WAIT)
        assert await broker.put("a", answer(done)) is PutStatus.ACCEPTED
        assert await broker.release("a") == 1
        status = await broker.status()
        assert status.engines == {"b": 0}
        assert (status.depth["leased"], status.depth["ready"]) == (1, 1)
        assert await broker.put("a", answer(lost)) is PutStatus.FENCED
        assert await broker.lease("a", 4, 0.05) == []
        (again,) = await broker.lease("b", 2, WAIT)
        assert (again.group_id, again.attempt) == (lost.group_id, 2), "first in the line"
        await broker.serving("a", 0)
        (fresh,) = await broker.lease("a", 2, WAIT)
        assert fresh.attempt == 1
        assert await broker.put("b", answer(other)) is PutStatus.ACCEPTED
        assert await broker.put("b", answer(again)) is PutStatus.ACCEPTED
        assert (await broker.accounting()).balanced


async def test_a_lease_that_a_released_engine_still_waits_for_is_never_granted(connect):
    async with opened(connect()) as broker:
        await broker.serving("a", 0)
        waiting = asyncio.create_task(broker.lease("a", 4, 1.0))
        await asyncio.sleep(0)
        await broker.status()  # calls of one caller begin in order, so the lease has begun
        assert await broker.release("a") == 0
        await begin_work(broker, 2)
        assert await waiting == []
        assert len(await broker.lease("a", 4, WAIT)) == 2


async def test_an_engine_that_lags_after_a_batch_gets_its_weights_before_new_groups(connect):
    async with opened(connect(patience_seconds=WAIT)) as broker:
        await train_a_batch(broker, 6, capacity=4)
        assert await broker.lease("a", 4, 0.2) == [], "it serves 0, the learner is at 1"
        waiting = asyncio.create_task(broker.lease("a", 4, WAIT))
        await broker.serving("a", 1)
        assert [lease.start_version for lease in await waiting] == [1, 1]


async def test_patience_with_an_engine_that_lags_ends(connect):
    async with opened(connect(patience_seconds=0.3)) as broker:
        await train_a_batch(broker, 6, capacity=4)
        assert [lease.start_version for lease in await broker.lease("a", 4, WAIT)] == [0, 0]


async def test_a_release_after_the_end_says_that_no_successor_is_needed(connect):
    async with opened(connect()) as broker:
        await begin_work(broker, 2, last=True)
        await generate(broker, 2)
        await train(broker, 0)
        with pytest.raises(QueueClosed, match="the run is over"):
            await broker.release("a")


async def test_a_lease_without_heartbeat_is_lost_and_one_with_it_is_kept(connect):
    async with opened(connect(lease_seconds=0.4, heartbeat_seconds=0.1)) as broker:
        kept, lost = await begin_work(broker, 2, "a", "b", capacity=4)

        async def beat():
            while await broker.heartbeat("a", [(kept.group_id, 1)]) == []:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

        beating = asyncio.create_task(beat())
        (again,) = await broker.lease("b", 4, WAIT)
        assert (again.group_id, again.attempt) == (lost.group_id, 2)
        assert not beating.done()
        held = [(kept.group_id, 1), (lost.group_id, 1)]
        assert await broker.heartbeat("a", held) == [(lost.group_id, 1)]
        beating.cancel()


async def test_an_evaluation_is_scored_and_stays_out_of_the_accounts(connect):
    async with opened(connect()) as broker:
        await broker.issue(make_prompts(2), cursor="2")
        prompts = make_prompts(3, 100)
        await broker.evaluate("heldout/1", prompts, temperature=0.0, min_version=1)
        await broker.evaluate("heldout/1", prompts, temperature=0.0, min_version=1)
        await broker.serving("old", 0)
        (train_lease,) = await broker.lease("old", 2, WAIT)
        assert train_lease.purpose is Purpose.TRAIN
        await broker.serving("new", 1)
        leases = await broker.lease("new", 3, WAIT)
        assert [lease.prompt for lease in leases] == prompts
        assert all(
            (x.purpose, x.group_size, x.temperature, x.deadline_version)
            == (Purpose.EVALUATE, 1, 0.0, None)
            for x in leases
        )
        first, second, third = leases
        assert await broker.put("new", answer(first, reward=0.0)) is PutStatus.ACCEPTED
        assert await broker.evaluation("heldout/1", 0.0) is None
        await broker.fail("new", second.group_id, 1, reason="lost", error="preempted")
        (second,) = await broker.lease("new", 1, WAIT)
        await broker.put("new", answer(second, reward=1.0, version=2))
        for attempt in (1, 2):
            await broker.fail("new", third.group_id, attempt, reason="lost", error="preempted")
            if attempt == 1:
                await broker.lease("new", 1, WAIT)
        outcome = await broker.evaluation("heldout/1", WAIT)
        assert (outcome.count, outcome.failed, outcome.score) == (3, 1, 0.5)
        assert (outcome.lowest_version, outcome.highest_version) == (1, 2)
        accounting = await broker.accounting()
        assert (accounting.issued, accounting.leased, accounting.balanced) == (2, 1, True)
        assert (await broker.status()).live == 1
        with pytest.raises(ProtocolError, match="known are \\['heldout/1'\\]"):
            await broker.evaluation("heldout/2", 0.0)


async def test_evaluations_take_their_place_in_the_room_and_train_groups_what_fits_in_the_rest(
    connect,
):
    async with opened(connect()) as broker:
        await broker.issue(make_prompts(4), cursor="4")
        await broker.evaluate("one", make_prompts(1, 9), temperature=0.0, min_version=0)
        await broker.serving("a", 0)
        leases = await broker.lease("a", 5, WAIT)
        assert [lease.group_size for lease in leases] == [1, 2, 2]
        await broker.evaluate("many", make_prompts(6, 10), temperature=0.0, min_version=0)
        leases = await broker.lease("a", 5, WAIT)
        assert [lease.purpose for lease in leases] == [Purpose.EVALUATE] * 5
        leases = await broker.lease("a", 2, WAIT)
        assert [lease.group_size for lease in leases] == [1], "the rest is too small for a group"
        assert await broker.lease("a", 1, 0.05) == []
        leases = await broker.lease("a", 9, WAIT)
        assert [lease.group_size for lease in leases] == [2, 2]


async def test_workers_stay_for_the_evaluation_of_the_last_version(connect):
    async with opened(connect(steps=1)) as broker:
        await broker.issue(make_prompts(2), cursor="2")
        await broker.evaluate("last", make_prompts(1, 9), temperature=0.0, min_version=1)
        await broker.serving("a", 0)
        await generate(broker, 2)
        await train(broker, 0)
        with pytest.raises(QueueClosed):
            await broker.prompts_wanted(WAIT)
        assert await broker.lease("a", 1, 0.05) == []
        waiting = asyncio.create_task(broker.lease("a", 1, WAIT))
        await broker.serving("a", 1)
        (lease,) = await waiting
        waiting = asyncio.create_task(broker.lease("a", 1, WAIT))
        await broker.put("a", answer(lease))
        with pytest.raises(QueueClosed):
            await waiting
        with pytest.raises(QueueClosed, match="after the end"):
            await broker.evaluate("late", make_prompts(1, 9), temperature=0.0, min_version=1)
        assert (await broker.evaluation("last", 0.0)).score == 1.0


async def test_the_last_batch_of_a_finite_source_is_short(connect):
    async with opened(connect()) as broker:
        await broker.issue(make_prompts(3), cursor="3", last=True)
        with pytest.raises(QueueClosed):
            await broker.prompts_wanted(WAIT)
        await broker.serving("a", 0)
        await generate(broker, 3)
        assert len((await broker.take(0, WAIT)).payloads) == 2
        await broker.ack(0, {})
        assert len((await broker.take(1, WAIT)).payloads) == 1
        with pytest.raises(ProtocolError, match="last prompts"):
            await broker.issue(make_prompts(1, 3), cursor="4")
        await broker.ack(1, {})
        for call in (broker.take(2, WAIT), broker.lease("a", 1, WAIT)):
            with pytest.raises(QueueClosed):
                await call


async def test_evaluations_of_versions_that_are_never_reached_do_not_hold_the_end(connect):
    async with opened(connect()) as broker:
        for version in (1, 2, 3):
            await broker.evaluate(
                f"v{version}", make_prompts(2, 10), temperature=0.0, min_version=version
            )
        await begin_work(broker, 2, last=True)
        await generate(broker, 2)
        await broker.take(0, WAIT)
        waiting = asyncio.ensure_future(broker.evaluation("v3", WAIT))
        await asyncio.sleep(0)
        await broker.ack(0, {})
        never = [await waiting, await broker.evaluation("v2", 0.0)]
        assert [(x.count, x.failed, x.score) for x in never] == [(2, 2, None)] * 2
        with pytest.raises(QueueClosed):
            await broker.take(1, WAIT)
        assert (await broker.status()).evaluations == ["v1"], "the last version is evaluated"
        await broker.evaluate("late", make_prompts(1, 20), temperature=0.0, min_version=2)
        assert (await broker.evaluation("late", 0.0)).failed == 1
        await broker.serving("a", 1)
        await put_all(broker, await broker.lease("a", 4, WAIT))
        assert (await broker.evaluation("v1", 0.0)).score == 1.0
        with pytest.raises(QueueClosed):
            await broker.lease("a", 4, WAIT)
        accounting = await broker.accounting()
        assert (accounting.issued, accounting.failed, accounting.balanced) == (2, {}, True)


@over_ray
async def test_notes_of_the_holder_stay_and_go_with_the_next_lease(connect):
    async with opened(connect(max_staleness=2)) as broker:
        first, second = await begin_work(broker, 2, "a", "b", capacity=4)

        def note(engine, lease, *arguments):
            return broker.note(engine, lease.group_id, lease.attempt, *arguments)

        assert await note("a", first, 1, "turn/0", b"said", 0) == b"said"
        assert await note("a", first, 1, "turn/0", b"said again", 0) == b"said"
        assert await note("a", first, 0, "turn/0", b"elsewhere", 0) == b"elsewhere"
        assert await note("a", first, 1, "call/0/0", b"7", None) == b"7"
        assert await note("b", first, 1, "turn/1", b"foreign", 0) == b"foreign"
        await broker.release("a")
        assert await note("a", first, 1, "turn/1", b"late", 0) == b"late"
        other, again = await broker.lease("b", 4, WAIT)
        assert [lease.group_id for lease in (again, other)] == [first.group_id, second.group_id]
        assert again.notes == {
            (0, "turn/0"): b"elsewhere", (1, "turn/0"): b"said", (1, "call/0/0"): b"7",
        }  # fmt: skip
        assert (again.saved, other.notes) == (None, {})
        assert await note("a", again, 1, "turn/1", b"fenced", 0) == b"fenced"
        assert await note("b", again, 1, "turn/1", b"more", 0) == b"more"
        assert await broker.put("b", answer(again)) is PutStatus.ACCEPTED
        assert await note("b", again, 1, "turn/1", b"too late", 0) == b"too late"


@over_ray
async def test_status_counts_what_was_accepted_and_names_the_last_failure(connect):
    async with opened(connect()) as broker:
        await broker.issue(make_prompts(2), cursor="2")
        await broker.evaluate("e", make_prompts(1, 9), temperature=0.0, min_version=0)
        await broker.serving("a", 0)
        status = await broker.status()
        assert (status.accepted, status.last_error) == (0, None)
        evaluated, first, second = await broker.lease("a", 5, WAIT)
        seen = []
        for lease in (evaluated, first):
            await put_all(broker, [lease])
            seen.append((await broker.status()).accepted)
        await broker.fail("a", second.group_id, 1, reason="reward", error="ValueError: no number")
        assert (await broker.status()).last_error == (
            "group g00000002 (prompt sums/0/1), attempt 1 by a: reward: ValueError: no number"
        )
        await generate(broker, 1)
        await train(broker, 0)
        seen.append((await broker.status()).accepted)
        assert seen == [1, 2, 3], "training takes nothing from it"


@over_ray
async def test_closing_ends_every_long_poll(connect):
    async with opened(connect()) as broker:
        await broker.issue(make_prompts(6), cursor="6")
        await broker.evaluate("e", make_prompts(1, 9), temperature=0.0, min_version=3)
        calls = [
            asyncio.ensure_future(call)
            for call in (
                broker.prompts_wanted(WAIT),
                broker.lease("a", 1, WAIT),
                broker.take(0, WAIT),
                broker.evaluation("e", WAIT),
            )
        ]
        await broker.serving("b", 0)
        await broker.close()
        await broker.close()
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(end) for end in ended] == [QueueClosed] * 4
        for call in (broker.accounting(), broker.heartbeat("a", []), broker.lease("a", 1, 0)):
            with pytest.raises(QueueClosed):
                await call


@over_ray
async def test_errors_of_callers_name_what_is_allowed(connect):
    async with opened(connect()) as broker:
        with pytest.raises(ProtocolError, match="capacity = 0 must be at least 1"):
            await broker.lease("a", 0, WAIT)
        with pytest.raises(InputError, match="'e' has no prompts"):
            await broker.evaluate("e", [], temperature=0.0, min_version=0)
        with pytest.raises(InputError, match="min_version = 4, but the last is 3"):
            await broker.evaluate("e", make_prompts(1), temperature=0.0, min_version=4)
        await begin_work(broker, 2)
        await generate(broker, 2)
        await broker.take(0, WAIT)
        with pytest.raises(InputError, match="statistics of batch 0 are not JSON"):
            await broker.ack(0, {"loss": object()})
        await broker.commit_checkpoint(0, "checkpoints/0")
        await broker.serving("b", 2)
        with pytest.raises(ProtocolError, match="'b' reports version 1 after 2"):
            await broker.serving("b", 1)


async def test_another_window_wakes_the_engines_that_wait_for_it(connect):
    async with opened(connect(window=2)) as broker:
        await begin_work(broker, 4)
        assert len(await broker.lease("a", 8, WAIT)) == 2
        waiting = asyncio.create_task(broker.lease("a", 2, WAIT))
        assert await broker.lease("b", 2, 0.05) == []
        await broker.resize(3)
        assert len(await waiting) == 1
        assert (await broker.status()).window == 3

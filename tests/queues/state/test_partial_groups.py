"""Tokens that were saved without a result: who gets them, and when they are left."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from queues.errors import SchemaError
from queues.policy.admission import Bounds, feasible, fits, leases_allowed
from queues.schema import decode
from tests.queues.conftest import (
    WAIT,
    answer,
    begin_work,
    make_broker,
    make_prompts,
    opened,
    train_a_batch,
    unfinished,
)


@given(
    due=st.dictionaries(st.integers(2, 7), st.integers(0, 4)),
    saved=st.integers(0, 5),
    others=st.integers(0, 4),
    engine=st.integers(0, 5),
    staleness=st.integers(0, 3),
)
def test_a_group_that_goes_on_leaves_room_for_those_that_are_leased_with_it(
    due, saved, others, engine, staleness
):
    bounds = Bounds(max_staleness=staleness, groups_per_batch=2, steps=9)
    rules = {"version": 3, "bounds": bounds}
    if not fits(due, [min(saved, engine)] + [engine] * others, **rules):
        return
    start = min(saved, engine)
    after = Counter(due)
    after[bounds.deadline(start)] += 1
    assert bounds.deadline(start) >= 3, "not overdue"
    for _ in range(others):
        assert leases_allowed(after, start_version=engine, **rules)
        after[bounds.deadline(engine)] += 1
    assert feasible(after, version=3, groups_per_batch=2)
    assert after.total() <= bounds.window(3)


async def test_the_next_lease_carries_what_was_saved_and_starts_at_its_oldest_token(tmp_path):
    async with opened(make_broker(tmp_path, steps=5, max_staleness=2)) as broker:
        leases = await begin_work(broker, 3, capacity=6)
        assert [lease.saved for lease in leases] == [None] * 3
        await broker.save("a", unfinished(leases[0], 0))
        await broker.save("a", unfinished(leases[0], 0, 1, 1))
    async with opened(make_broker(tmp_path, steps=5, max_staleness=2)) as broker:
        await broker.serving("b", 1)
        first, second, third = await broker.lease("b", 6, WAIT)
        [rollout] = decode(first.saved).rollouts
        assert list(rollout.versions) == [-1, -1, -1, 0, 1, 1], "the newest that was saved"
        assert (first.attempt, first.start_version, first.deadline_version) == (2, 0, 2)
        assert [x.saved for x in (second, third)] == [None, None]
        assert [x.deadline_version for x in (second, third)] == [3, 3]
        await broker.put("b", answer(first, version=0))
        assert broker.commits.state.groups.in_flight[first.group_id].due == 2
    async with opened(make_broker(tmp_path, steps=5, max_staleness=2)) as again:
        assert again.commits.ledger.oldest("partials") == {}, "forgotten with the result"


@pytest.mark.parametrize("noted", [False, True])
async def test_what_is_too_old_is_deleted_and_the_group_is_sampled_afresh(tmp_path, noted):
    async with opened(make_broker(tmp_path, steps=5, max_staleness=1)) as broker:
        (straggler,) = await begin_work(broker, 8, "a", "b", capacity=2)
        for lease in await broker.lease("b", 6, WAIT):
            await broker.put("b", answer(lease))
        await broker.take(0, WAIT)
        await broker.ack(0, {})
        await broker.serving("b", 1)
        for lease in await broker.lease("b", 4, WAIT):
            await broker.put("b", answer(lease))
        if noted:
            await broker.note("a", straggler.group_id, 1, 0, "turn/0", b"", 0)
            await broker.save("a", unfinished(straggler, 1))
        else:
            await broker.save("a", unfinished(straggler, 0))
        await broker.release("a")
        await broker.take(1, WAIT)
        await broker.ack(1, {})
        await broker.serving("b", 2)
        again, *_ = await broker.lease("b", 2, WAIT)
        assert await all_notes(broker) == []
        assert await broker.commits.submit(lambda: broker.commits.ledger.oldest("partials")) == {}
    assert (again.group_id, again.attempt) == (straggler.group_id, 2)
    assert (again.saved, again.notes) == (None, {})
    assert (again.start_version, again.deadline_version) == (2, 3)


async def test_notes_count_as_saved_tokens_do_and_are_deleted_with_the_result(tmp_path):
    sizes = {"steps": 5, "max_staleness": 2}
    async with opened(make_broker(tmp_path, **sizes)) as broker:
        await train_a_batch(broker, 6, capacity=4)
        await broker.serving("a", 1)
        noted, both, plain = await broker.lease("a", 6, WAIT)
        await broker.note("a", noted.group_id, 1, 0, "turn/0", b"0", 2)
        await broker.note("a", noted.group_id, 1, 0, "turn/1", b"1", 1)
        await broker.note("a", noted.group_id, 1, 0, "call/1/0", b"2", None)
        await broker.save("a", unfinished(both, 1))
        await broker.note("a", both.group_id, 1, 1, "turn/0", b"3", 2)
        await broker.note("a", plain.group_id, 1, 0, "call/0/0", b"4", None)
    async with opened(make_broker(tmp_path, **sizes)) as broker:
        await broker.serving("b", 2)
        leases = await broker.lease("b", 6, WAIT)
        assert [lease.start_version for lease in leases] == [1, 1, 2]
        assert [lease.deadline_version for lease in leases] == [3, 3, 4]
        assert [sorted(lease.notes.values()) for lease in leases] == [
            [b"0", b"1", b"2"], [b"3"], [],
        ]  # fmt: skip
        assert [lease.saved is not None for lease in leases] == [False, True, False]
        assert await all_notes(broker) == [(noted.group_id, 3), (both.group_id, 1)]
        await broker.put("b", answer(leases[0]))
        await broker.put("b", answer(leases[1]))
        assert await all_notes(broker) == []


async def all_notes(broker):
    select = "SELECT group_id, count(*) FROM notes GROUP BY group_id ORDER BY group_id"
    execute = broker.commits.ledger.execute
    return await broker.commits.submit(lambda: [tuple(row) for row in execute(select)])


async def test_a_second_failed_attempt_deletes_the_notes_and_an_excused_one_does_not(tmp_path):
    async with opened(make_broker(tmp_path, max_attempts=4)) as broker:
        (lease,) = await begin_work(broker, 1, capacity=2)
        carried = []
        for reason in ("boom", "infrastructure", "boom", "boom"):
            where = lease.group_id, lease.attempt
            await broker.note("a", *where, 0, f"turn/{len(carried)}", b"", 0)
            await broker.save("a", unfinished(lease, 0))
            await broker.fail("a", *where, reason=reason, error="")
            if len(carried) < 3:
                (lease,) = await broker.lease("a", 2, WAIT)
                carried.append([name for _, name in lease.notes])
                assert lease.saved is not None
        assert carried == [["turn/0"], ["turn/0", "turn/1"], []]


async def test_what_is_not_the_holders_or_not_for_training_is_not_saved(tmp_path):
    async with opened(make_broker(tmp_path)) as broker:
        await broker.evaluate("e", make_prompts(1, 7), temperature=0.0, min_version=0)
        evaluation, lease = await begin_work(broker, 1, capacity=3)
        await broker.save("a", unfinished(evaluation, 0))
        await broker.note("a", evaluation.group_id, 1, 0, "turn/0", b"", 0)
        await broker.save("b", unfinished(lease, 0))
        with pytest.raises(SchemaError, match="nothing of group"):
            await broker.save("a", unfinished(lease))
        assert await broker.commits.submit(lambda: broker.commits.ledger.oldest("partials")) == {}
        assert await all_notes(broker) == []

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
        assert again.commits.ledger.oldest_partials() == {}, "forgotten with the result"


async def test_saved_tokens_that_are_too_old_are_left_and_the_group_is_sampled_afresh(
    tmp_path,
):
    async with opened(make_broker(tmp_path, steps=5, max_staleness=1)) as broker:
        (straggler,) = await begin_work(broker, 8, "a", "b", capacity=2)
        for lease in await broker.lease("b", 6, WAIT):
            await broker.put("b", answer(lease))
        await broker.take(0, WAIT)
        await broker.ack(0, {})
        await broker.serving("b", 1)
        for lease in await broker.lease("b", 4, WAIT):
            await broker.put("b", answer(lease))
        await broker.save("a", unfinished(straggler, 0))
        await broker.release("a")
        await broker.take(1, WAIT)
        await broker.ack(1, {})
        await broker.serving("b", 2)
        again, *_ = await broker.lease("b", 2, WAIT)
    assert (again.group_id, again.attempt) == (straggler.group_id, 2)
    assert (again.saved, again.start_version, again.deadline_version) == (None, 2, 3)


async def test_what_is_not_the_holders_or_not_for_training_is_not_saved(tmp_path):
    async with opened(make_broker(tmp_path)) as broker:
        await broker.evaluate("e", make_prompts(1, 7), temperature=0.0, min_version=0)
        evaluation, lease = await begin_work(broker, 1, capacity=3)
        await broker.save("a", unfinished(evaluation, 0))
        await broker.save("b", unfinished(lease, 0))
        with pytest.raises(SchemaError, match="nothing of group"):
            await broker.save("a", unfinished(lease))
        assert await broker.commits.submit(broker.commits.ledger.oldest_partials) == {}

"""What becomes of stragglers under each policy: in simulated runs, and through the broker."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import InputError
from queues.readers.accounting import read_accounting
from queues.records import PutStatus
from queues.schema import decode
from queues.state.groups import FILTERED, State
from tests.queues.conftest import (
    WAIT,
    answer,
    begin_work,
    make_broker,
    make_prompts,
    opened,
    put_all,
)
from tests.queues.simulated_run import Run, make_state

POLICIES = st.sampled_from(["wait", "drop", "mask", "train"])
RATES = st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.9, 0.99, 1.0])


@given(
    st.integers(0, 2**32), POLICIES, st.integers(0, 4), st.integers(1, 5), st.integers(1, 12),
    st.integers(1, 4), RATES, st.booleans(), st.booleans(), st.none() | st.integers(0, 5),
)  # fmt: skip
def test_every_batch_is_full_within_the_bound_and_accounted_for_under_every_policy(
    seed, policy, staleness, size, steps, limit, tie_rate, baseline, changes_window, more
):
    most_live = None if more is None else size + more
    state = make_state(
        staleness, size, steps, limit, baseline=baseline, policy=policy, most_live=most_live
    )
    run = Run(state, seed, tie_rate, changes_window=changes_window)
    run.run()  # and its own assertions, after every event
    assert [len(batch) for batch in run.batches] == [size] * steps
    if tie_rate == 1.0:
        assert run.tied_trained == size * steps
        assert run.dropped[0] == limit * size, "what is let through early leaves less to drop"
    if tie_rate == 0.0:
        assert not run.dropped


@given(
    st.integers(0, 2**32), POLICIES, RATES, st.integers(0, 4), st.integers(1, 5),
    st.integers(1, 40), st.integers(1, 4), st.booleans(), st.sampled_from([0.0, 0.05]),
)  # fmt: skip
def test_finite_prompts_all_come_to_an_end_and_only_the_last_batch_is_short(
    seed, policy, tie_rate, staleness, size, prompts, limit, changes_window, fail_rate
):
    state = make_state(staleness, size, 100, limit, policy=policy)
    run = Run(state, seed, tie_rate, prompts=prompts, changes_window=changes_window)
    run.fail_rate = fail_rate
    run.run()
    assert len(run.issued) == prompts
    assert state.groups.train(State.QUEUED) == 0
    sizes = [len(batch) for batch in run.batches]
    assert all(trained == size for trained in sizes[:-1])
    failed = state.groups.train(State.FAILED)
    assert sum(sizes) + state.groups.dropped(FILTERED) + failed == prompts, "no prompt is lost"


def test_the_simulation_has_stragglers_for_every_policy_to_deal_with():
    outcomes = {}
    for policy in ("wait", "drop", "mask", "train"):
        run = Run(make_state(1, 3, 60, 1, policy=policy), seed=5, tie_rate=0.1)
        run.run()
        outcomes[policy] = (bool(run.reissued), bool(run.late), max(run.lags) > 1)
    assert outcomes == {
        "wait": (False, False, False),
        "drop": (True, False, False),
        "mask": (False, True, False),
        "train": (False, True, True),
    }


def test_without_staleness_every_policy_is_synchronous_training():
    runs = []
    for policy in ("wait", "drop", "mask", "train"):
        run = Run(make_state(0, 3, 20, 1, policy=policy), seed=7, tie_rate=0.2)
        run.run()
        assert (run.reissued, run.late, set(run.lags)) == ({}, set(), {0})
        runs.append(run.batches)
    assert runs == [runs[0]] * 4


# --- through the broker: 2 groups a batch, 1 version of staleness


async def straggle(broker):
    """Take the batch that the first of four groups is due with before that group is ready."""
    straggler, *others = await begin_work(broker, 9, capacity=8)
    await put_all(broker, others)
    await broker.take(0, WAIT)
    await broker.serving("a", 1)
    await broker.ack(0, {"loss": 0.5})
    (fresh,) = await broker.lease("a", 2, WAIT)
    await broker.put("a", answer(fresh))
    batch = await broker.take(1, WAIT)
    group_ids = [decode(payload).group_id for payload in batch.payloads]
    assert group_ids == [others[2].group_id, fresh.group_id]
    return straggler


async def test_a_dropped_group_is_fenced_and_its_prompt_first_in_line(connect):
    async with opened(connect(on_overdue="drop", patience_seconds=0.0)) as broker:
        straggler = await straggle(broker)
        held = [(straggler.group_id, straggler.attempt)]
        assert await broker.heartbeat("a", held) == held, "it is to be aborted"
        (anew,) = await broker.lease("a", 2, WAIT)
        assert anew.prompt == straggler.prompt
        assert (anew.group_id, anew.attempt) == ("g00000010", 1)
        assert await broker.put("a", answer(straggler)) is PutStatus.FENCED
        assert await broker.put("a", answer(anew)) is PutStatus.ACCEPTED
        accounts = await broker.accounting()
        assert (accounts.issued, accounts.dropped, accounts.duplicates) == (10, {"overdue": 1}, 1)
        assert accounts.balanced
        await broker.serving("a", 2)
        await broker.ack(1, {})
        assert (await broker.status()).batches[-1].statistics == {"groups_overdue": 1}


async def test_whoever_waits_for_work_gets_the_place_that_a_dropped_group_leaves(tmp_path):
    async with opened(make_broker(tmp_path, on_overdue="drop", patience_seconds=0.0)) as broker:
        straggler, *others = await begin_work(broker, 4, capacity=8)
        await put_all(broker, others[:2])
        await broker.take(0, WAIT)
        await broker.serving("a", 1)
        await broker.ack(0, {})
        waiting = asyncio.create_task(broker.lease("a", 2, WAIT))
        await broker.put("a", answer(others[2]))
        await broker.issue(make_prompts(1, 4), cursor="5")
        (fresh,) = await waiting
        again = asyncio.create_task(broker.lease("a", 2, WAIT))
        await broker.put("a", answer(fresh))
        await broker.take(1, WAIT)
        (anew,) = await again
        assert anew.prompt == straggler.prompt


@pytest.mark.parametrize("policy", ["mask", "train"])
async def test_an_overdue_group_is_trained_when_it_is_ready_and_counted(connect, policy):
    async with opened(connect(on_overdue=policy, patience_seconds=0.0)) as broker:
        straggler = await straggle(broker)
        status = await broker.status()
        assert (status.overdue, status.live, status.waits_for) == (1, 3, {})
        held = [(straggler.group_id, straggler.attempt)]
        assert await broker.heartbeat("a", held) == []
        await broker.serving("a", 2)
        await broker.ack(1, {})
        assert await broker.put("a", answer(straggler)) is PutStatus.ACCEPTED
        (fresh, *_) = await broker.lease("a", 2, WAIT)
        await broker.put("a", answer(fresh))
        batch = await broker.take(2, WAIT)
        group_ids = [decode(payload).group_id for payload in batch.payloads]
        assert group_ids == [straggler.group_id, fresh.group_id], (
            "what has waited longest comes first"
        )
        assert (await broker.status()).overdue == 0
        await broker.ack(2, {})
        counted = [batch.statistics for batch in (await broker.status()).batches]
        assert counted[1:] == [{"groups_overdue": 0}, {"groups_overdue": 1}]
        assert (await broker.accounting()).balanced


async def test_what_is_overdue_and_what_was_counted_is_known_to_the_next_broker(tmp_path):
    settings = {"on_overdue": "mask", "patience_seconds": 0.0}
    async with opened(make_broker(tmp_path, **settings)) as broker:
        straggler = await straggle(broker)
        await broker.put("a", answer(straggler))
    async with opened(make_broker(tmp_path, **settings)) as broker:
        status = await broker.status()
        assert (status.overdue, status.depth["ready"], status.depth["taken"]) == (1, 1, 2)
        await broker.take(1, WAIT)
        await broker.ack(1, {})
        await broker.serving("a", 2)
        (fresh, *_) = await broker.lease("a", 2, WAIT)
        await broker.put("a", answer(fresh))
        await broker.take(2, WAIT)
    async with opened(make_broker(tmp_path, **settings)) as broker:
        await broker.ack(2, {})
        assert (await broker.status()).batches[-1].statistics == {"groups_overdue": 1}
        assert (await broker.accounting()).balanced


@pytest.mark.parametrize("policy", ["drop", "wait"])
async def test_a_late_result_is_dropped_where_the_policy_of_a_run_is_changed_to_keep_the_bound(
    tmp_path, policy
):
    async with opened(make_broker(tmp_path, on_overdue="train", patience_seconds=0.0)) as broker:
        straggler = await straggle(broker)
        await broker.put("a", answer(straggler))
    async with opened(make_broker(tmp_path, on_overdue=policy)) as broker:
        accounts = await broker.accounting()
        assert (accounts.dropped, accounts.ready, accounts.balanced) == ({"overdue": 1}, 0, True)
        assert (await broker.status()).accepted == 5
    assert read_accounting(tmp_path).issued == 10


async def test_a_run_that_would_wait_for_ever_after_a_change_of_policy_is_refused(tmp_path):
    settings = {"max_staleness": 2, "steps": 9, "patience_seconds": 0.0}
    async with opened(make_broker(tmp_path, on_overdue="train", **settings)) as broker:
        # Four results that are due with a batch of two.
        due_at_2 = await begin_work(broker, 9, capacity=12)
        for version, ready in enumerate((due_at_2[:2], None)):
            await put_all(broker, ready or await broker.lease("a", 4, WAIT))
            await broker.take(version, WAIT)
            await broker.serving("a", version + 1)
            await broker.ack(version, {})
        await put_all(broker, due_at_2[2:])
        assert (await broker.status()).depth["ready"] == 4
    with pytest.raises(InputError, match='on_overdue = "wait", but this run went on with another'):
        make_broker(tmp_path, on_overdue="wait", **settings)
    async with opened(make_broker(tmp_path, on_overdue="drop", **settings)) as broker:
        assert len((await broker.take(2, WAIT)).payloads) == 2
        assert (await broker.accounting()).dropped == {"overdue": 2}

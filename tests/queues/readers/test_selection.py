"""What is left out of training, through the broker: filtered groups and retired prompts."""

import asyncio
import logging
import sqlite3
import time
from collections import Counter

import pytest

from headway.errors import InputError
from queues.errors import QueueClosed
from queues.policy.curriculum import CurriculumConfig
from queues.readers.group_history import read_history
from queues.readers.open_run import open_ledger
from queues.readers.parquet import export_parquet
from queues.records import Prompt, PutStatus
from queues.schema import decode
from queues.storage.ledger_schema import FILE_NAME
from tests.queues.broker.test_broker import train
from tests.queues.conftest import WAIT, answer, begin_work, make_broker, make_prompts, opened


def epoch(number, *indices):
    return [Prompt(prompt_id=f"sums/{number}/{i}", text=f"{i}+1=") for i in indices]


async def put(broker, groups, *, tied, reward=0.0):
    """Lease with room for this many groups, and put a result for each."""
    leases = await broker.lease("a", 2 * groups, WAIT)
    assert len(leases) == groups
    for lease in leases:
        payload = answer(lease, tied=tied, reward=reward)
        assert await broker.put("a", payload) is PutStatus.ACCEPTED


async def test_a_group_without_a_signal_is_dropped_and_another_generated_in_its_place(connect):
    async with opened(connect(filter_tied=True)) as broker:
        leases = await begin_work(broker, 6, capacity=8)
        assert await broker.lease("a", 8, 0.05) == [], "all places are taken"
        assert await broker.prompts_wanted(0.0) == 0, "6 groups are all that can be trained"
        more = asyncio.create_task(broker.prompts_wanted(WAIT))
        waiting = asyncio.create_task(broker.lease("a", 8, WAIT))
        await asyncio.sleep(0)
        assert await broker.put("a", answer(leases[0], tied=True)) is PutStatus.ACCEPTED
        assert await broker.put("a", answer(leases[0], tied=True)) is PutStatus.DUPLICATE
        (refill,) = await waiting
        assert await more == 1
        await broker.issue(make_prompts(1, 6), cursor="7")
        status = await broker.status()
        assert (status.live, status.accepted, status.depth["dropped"]) == (4, 1, 1)
        for lease in (*leases[1:], refill):
            assert await broker.put("a", answer(lease)) is PutStatus.ACCEPTED
        batch = await broker.take(0, WAIT)
        groups = [decode(payload).group_id for payload in batch.payloads]
        assert groups == [leases[1].group_id, leases[2].group_id]
        accounts = await broker.accounting()
        assert (accounts.issued, accounts.queued, accounts.ready, accounts.taken) == (7, 2, 2, 2)
        assert (accounts.dropped, accounts.duplicates) == ({"filtered": 1}, 1)
        assert accounts.balanced


async def test_training_of_groups_without_a_signal_is_logged_once_a_batch(tmp_path, caplog):
    settings = {"filter_tied": True, "max_filtered_batches": 1}
    with caplog.at_level(logging.WARNING, "queues.broker.broker"):
        async with opened(make_broker(tmp_path, **settings)) as broker:
            await begin_work(broker, 8)
            await put(broker, 4, tied=True)
            await put(broker, 2, tied=True)
            await train(broker, 0)
            await broker.serving("a", 1)
            await put(broker, 2, tied=True)
    assert [record.getMessage() for record in caplog.records] == [
        "batch 0: 2 groups without a signal were filtered, the limit"
        " (queues.max_filtered_batches); more of them are trained"
    ]


async def test_a_finite_source_ends_when_its_last_group_is_filtered(connect):
    async with opened(connect(filter_tied=True)) as broker:
        await broker.serving("a", 0)
        await broker.evaluate("late", make_prompts(1, 9), temperature=0.0, min_version=2)
        await broker.issue(make_prompts(3), cursor="3", last=True)
        first, *rest = await broker.lease("a", 6, WAIT)
        await broker.put("a", answer(first))
        await broker.put("a", answer(rest[0], tied=True))
        waiting = asyncio.create_task(broker.take(0, WAIT))
        await asyncio.sleep(0)
        await broker.put("a", answer(rest[1], tied=True))
        assert len((await waiting).payloads) == 1, "the last batch is short"
        await broker.ack(0, {})
        with pytest.raises(QueueClosed):
            await broker.take(1, WAIT)
        with pytest.raises(QueueClosed):
            await broker.lease("a", 2, WAIT)
        assert (await broker.evaluation("late", 0.0)).failed == 1
        accounts = await broker.accounting()
        assert (accounts.trained, accounts.dropped, accounts.balanced) == (1, {"filtered": 2}, True)


async def test_whoever_waits_leaves_when_everything_was_filtered(connect):
    async with opened(connect(filter_tied=True)) as broker:
        (lease,) = await begin_work(broker, 1, last=True, capacity=2)
        calls = [
            asyncio.ensure_future(call)
            for call in (broker.take(0, WAIT), broker.lease("a", 2, WAIT))
        ]
        await asyncio.sleep(0)
        await broker.put("a", answer(lease, tied=True))
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(end) for end in ended] == [QueueClosed] * 2


async def test_filtered_groups_stay_in_the_journal_with_their_state_and_times(tmp_path):
    import pyarrow.parquet as pq

    async with opened(make_broker(tmp_path, filter_tied=True, patience_seconds=0.0)) as broker:
        await begin_work(broker, 6)
        await put(broker, 1, tied=True)
        await put(broker, 2, tied=False)
        await train(broker, 0)
        await put(broker, 1, tied=True)
        await put(broker, 1, tied=False)
        assert export_parquet(tmp_path, tmp_path / "live.parquet") == 10
    assert export_parquet(tmp_path, tmp_path / "all.parquet") == 10
    table = pq.read_table(tmp_path / "all.parquet")
    states = ["dropped"] * 2 + ["trained"] * 4 + ["dropped"] * 2 + ["ready"] * 2
    assert table["state"].to_pylist() == states
    assert table["trained_version"].to_pylist() == [None] * 2 + [0] * 4 + [None] * 4
    groups = read_history(tmp_path, 0, 2).groups
    assert [group.taken_at == group.accepted_at for group in groups] == [
        True, False, False, True, False,
    ]  # fmt: skip
    later = read_history(tmp_path, 1, 2).groups
    assert [group.accepted_at for group in later] == [x.accepted_at for x in groups[3:]]


# --- retired prompts


async def test_a_mastered_prompt_is_not_issued_again(connect):
    async with opened(connect(pass_rate_cap=0.75)) as broker:
        await broker.serving("a", 0)
        await broker.issue(epoch(0, 1, 2), cursor="2")
        mastered, other = await broker.lease("a", 4, WAIT)
        await broker.put("a", answer(mastered, reward=1.0))
        await broker.put("a", answer(other, reward=0.5))
        await broker.issue(epoch(1, 2, 1), cursor="4")
        assert await broker.cursor() == "4"
        (again,) = await broker.lease("a", 8, WAIT)
        assert again.prompt.prompt_id == "sums/1/2"
        await broker.put("a", answer(again, reward=0.0))
        await train(broker, 0)
        assert (await broker.status()).batches[-1].statistics == {"loss": 0.5, "prompts_retired": 1}
        accounts = await broker.accounting()
        assert (accounts.issued, accounts.balanced) == (3, True)


async def test_a_source_whose_prompts_are_all_mastered_ends_the_run_with_a_short_batch(connect):
    async with opened(connect(pass_rate_cap=1.0)) as broker:
        await broker.serving("a", 0)
        await broker.issue(epoch(0, 1, 2, 3), cursor="3")
        for lease in await broker.lease("a", 6, WAIT):
            await broker.put("a", answer(lease, reward=1.0))
        for number in (1, 2, 3):  # that the first was skipped from its beginning is not known
            assert await broker.prompts_wanted(0.5) > 0
            await broker.issue(epoch(number, 2, 1, 3), cursor=f"{3 * number + 3}")
        with pytest.raises(QueueClosed):
            await broker.prompts_wanted(WAIT)
        await train(broker, 0)
        batch = await broker.take(1, WAIT)
        assert len(batch.payloads) == 1
        await broker.ack(1, {})
        with pytest.raises(QueueClosed):
            await broker.take(2, WAIT)
        accounts = await broker.accounting()
        assert (accounts.issued, accounts.trained, accounts.balanced) == (3, 3, True)


async def test_a_resumed_curriculum_issues_what_an_unbroken_one_does(tmp_path):
    settings = {"curriculum": CurriculumConfig(floor=0.3, groups=1)}

    async def measure(broker):
        await broker.serving("a", 0)
        await broker.issue(epoch(0, 1, 2, 3, 4), cursor="4")
        for reward in (-1.0, 1.0, 0.0, 0.0):  # none, both, one and one of the two rollouts pass
            (lease,) = await broker.lease("a", 2, WAIT)
            await broker.put("a", answer(lease, reward=reward))

    async def issue(broker, folder):
        for number in range(1, 30):
            await broker.issue(epoch(number, 4, 3, 2, 1), cursor=str(number))
        with open_ledger(folder, verify=False) as database:
            rows = database.execute("SELECT prompt_id FROM groups ORDER BY number").fetchall()
        return [prompt_id for (prompt_id,) in rows]

    unbroken, resumed = tmp_path / "unbroken", tmp_path / "resumed"
    async with opened(make_broker(unbroken, **settings)) as broker:
        await measure(broker)
        issued = await issue(broker, unbroken)
    async with opened(make_broker(resumed, **settings)) as broker:
        await measure(broker)
    async with opened(make_broker(resumed, **settings)) as broker:
        assert await issue(broker, resumed) == issued
        await train(broker, 0)
        statistics = (await broker.status()).batches[-1].statistics
    assert statistics == {"loss": 0.5, "curriculum_weight": (0.3 + 0.3 + 1 + 1) / 4}
    counts = Counter(prompt_id.rsplit("/")[-1] for prompt_id in issued)
    assert counts["3"] == counts["4"] == 30
    assert all(3 < counts[name] < 18 for name in "12")


@pytest.mark.parametrize("rule", [{"pass_rate_cap": 1.0}, {"curriculum": CurriculumConfig()}])
async def test_a_prompt_that_could_not_be_known_again_is_refused(connect, rule):
    async with opened(connect(**rule)) as broker:
        with pytest.raises(InputError, match="'7' must be of the form source/epoch/index"):
            await broker.issue([Prompt(prompt_id="7", text="7")], cursor="1")
        assert (await broker.accounting()).issued == 0


# --- prompts that are set aside


async def test_a_prompt_that_used_up_its_attempts_is_set_aside_for_good_with_its_error(tmp_path):
    async with opened(make_broker(tmp_path)) as broker:
        await broker.serving("a", 0)
        await broker.issue(epoch(0, 1, 2), cursor="2")
        for attempt in (1, 2):
            poisonous, *_ = await broker.lease("a", 2, WAIT)
            assert (poisonous.prompt.prompt_id, poisonous.attempt) == ("sums/0/1", attempt)
            await broker.fail("a", poisonous.group_id, attempt, reason="reward", error="boom")
        await broker.issue(epoch(1, 1, 2), cursor="4")
    async with opened(make_broker(tmp_path)) as broker:
        await broker.serving("a", 0)
        await broker.issue([*epoch(2, 2, 1), Prompt(prompt_id="plain", text="1")], cursor="7")
        leases = await broker.lease("a", 99, WAIT)
        ids = [lease.prompt.prompt_id for lease in leases]
        assert ids == ["sums/0/2", "sums/1/2", "sums/2/2", "plain"]
        accounts = await broker.accounting()
        assert (accounts.failed, accounts.balanced) == ({"reward": 1}, True)
    database = sqlite3.connect(tmp_path / FILE_NAME)
    failed = "SELECT prompt_id, reason, error FROM groups WHERE state = 'failed'"
    assert database.execute(failed).fetchall() == [("sums/0/1", "reward", "boom")]
    database.close()


async def test_whoever_waits_for_work_gets_a_failed_group_when_its_wait_is_over(connect):
    async with opened(connect(retry_seconds=0.2)) as broker:
        (lease,) = await begin_work(broker, 1, capacity=2)
        failed_at = time.monotonic()
        await broker.fail("a", lease.group_id, 1, reason="reward", error="boom")
        (again,) = await broker.lease("a", 2, WAIT)
        assert time.monotonic() - failed_at >= 0.2, "not before, however late the machine is"
        assert (again.group_id, again.attempt) == (lease.group_id, 2)


# --- greedy baselines


async def test_a_train_group_with_a_baseline_takes_room_for_one_more(connect):
    async with opened(connect(greedy_baseline=True)) as broker:
        await begin_work(broker, 4)
        await broker.evaluate("e", make_prompts(1, 9), temperature=0.0, min_version=0)
        leases = await broker.lease("a", 6, WAIT)
        assert [(x.group_size, x.greedy_baseline, x.capacity) for x in leases] == [
            (1, False, 1),
            (2, True, 3),
        ]
        assert await broker.lease("a", 2, 0.05) == []
        assert [lease.capacity for lease in await broker.lease("a", 6, WAIT)] == [3, 3]
        assert await broker.put("a", answer(leases[1])) is PutStatus.ACCEPTED


# --- recovery


async def test_what_was_left_out_is_remembered(tmp_path):
    settings = {
        "filter_tied": True,
        "max_filtered_batches": 1,
        "pass_rate_cap": 1.0,
        "pass_threshold": 0.5,
    }

    async with opened(make_broker(tmp_path, **settings)) as broker:
        await broker.serving("a", 0)
        await broker.issue(epoch(0, 1, 2, 3, 4, 5), cursor="5")
        await put(broker, 3, tied=True, reward=0.0)  # the third of them is let through
        (lease,) = await broker.lease("a", 2, WAIT)
        await broker.put("a", answer(lease, reward=0.5))
        await train(broker, 0)
        await broker.serving("a", 1)
        await put(broker, 1, tied=True, reward=1.0)
    async with opened(make_broker(tmp_path, **settings)) as broker:
        accounts = await broker.accounting()
        assert (accounts.dropped, accounts.trained) == ({"filtered": 3}, 2)
        assert accounts.balanced
        assert (await broker.status()).accepted == 5
        await broker.issue(epoch(1, 4, 3, 5), cursor="8")
        await broker.serving("a", 1)
        first, *others = await broker.lease("a", 8, WAIT)
        assert (first.prompt.prompt_id, others) == ("sums/1/3", []), "4 and 5 are mastered"
        await broker.put("a", answer(first, tied=True, reward=0.0))
        await broker.issue(epoch(2, 1, 2), cursor="10")
        await put(broker, 2, tied=True, reward=0.0)  # the limit is used up by two in two sessions
        await train(broker, 1)
        assert (await broker.status()).batches[-1].statistics == {
            "loss": 0.5,
            "groups_filtered": 4,
            "groups_let_through": 3,
            "prompts_retired": 2,
        }

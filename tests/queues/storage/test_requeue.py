"""`headway requeue`: failed groups are queued again, and no other."""

from dataclasses import replace

import pytest

from headway.errors import InputError
from queues.errors import LedgerError, QueueClosed
from queues.readers.accounting import read_accounting
from queues.storage.ledger_repair import requeue
from tests.queues.conftest import WAIT, begin_work, make_broker, make_prompts, opened, put_all


async def fail_two(directory):
    """Issue three prompts; the first two fail for good, and the third is ready."""
    async with opened(make_broker(directory, max_attempts=1)) as broker:
        await broker.issue(make_prompts(3), cursor="3")
        await broker.serving("engine-0", 0)
        leases = await broker.lease("engine-0", 6, timeout=1.0)
        for lease in leases[:2]:
            await broker.fail(
                "engine-0", lease.group_id, lease.attempt, reason="reward", error="no"
            )
        await put_all(broker, leases[2:], "engine-0")
    return [lease.prompt.prompt_id for lease in leases[:2]]


async def finish(directory):
    """Lease and put all that is queued; return the prompts."""
    async with opened(make_broker(directory, max_attempts=1)) as broker:
        await broker.serving("engine-0", 0)
        leases = await broker.lease("engine-0", 6, timeout=1.0)
        await put_all(broker, leases, "engine-0")
    return [(lease.prompt.prompt_id, lease.attempt) for lease in leases]


async def test_failed_prompts_are_leased_again_and_the_accounts_balance(tmp_path):
    failed = await fail_two(tmp_path)
    assert sum(read_accounting(tmp_path).failed.values()) == 2
    assert requeue(tmp_path) == failed
    accounts = read_accounting(tmp_path)
    assert (accounts.queued, accounts.failed, accounts.balanced) == (2, {}, True)
    assert sorted(await finish(tmp_path)) == [(prompt, 2) for prompt in sorted(failed)]
    assert read_accounting(tmp_path).balanced
    assert requeue(tmp_path) == []


async def test_a_source_whose_prompts_all_failed_is_asked_again(tmp_path):
    async with opened(make_broker(tmp_path, max_attempts=1)) as broker:
        (lease,) = await begin_work(broker, 1, capacity=2)
        await broker.fail("a", lease.group_id, 1, reason="reward", error="no")
        again = [
            replace(lease.prompt, prompt_id=f"sums/{epoch}/{lease.prompt.prompt_id[-1]}")
            for epoch in (1, 2, 3)
        ]
        await broker.issue(again, cursor="later")
        assert (await broker.status()).version == 0
        with pytest.raises(QueueClosed):
            await broker.prompts_wanted(WAIT)
    assert len(requeue(tmp_path)) == 1
    async with opened(make_broker(tmp_path)) as broker:
        assert await broker.prompts_wanted(WAIT) > 0


async def test_one_prompt_may_be_chosen_and_a_wrong_one_changes_nothing(tmp_path):
    first, second = await fail_two(tmp_path)
    with pytest.raises(InputError, match="'sums/0/9' has not failed"):
        requeue(tmp_path, [first, "sums/0/9"])
    assert sum(read_accounting(tmp_path).failed.values()) == 2
    assert requeue(tmp_path, [second]) == [second]
    assert sum(read_accounting(tmp_path).failed.values()) == 1


async def test_a_run_that_is_going_on_or_none_is_refused(tmp_path):
    with pytest.raises(InputError, match="not the folder of a run"):
        requeue(tmp_path)
    async with opened(make_broker(tmp_path)):
        with pytest.raises(LedgerError, match="another broker"):
            requeue(tmp_path)

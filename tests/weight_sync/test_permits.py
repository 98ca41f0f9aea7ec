"""Swap permits: at most `count`, granted in order, expired when their holder is dead."""

import asyncio

import pytest

from weight_sync.broadcaster import SwapPermits

SOON = 0.01
LONG = 60.0


async def settle():
    """Let every task go on as far as it can."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_permits_are_granted_in_the_order_of_the_requests():
    permits = SwapPermits(2, LONG)
    tasks = [asyncio.create_task(permits.acquire(f"e{number}", LONG)) for number in range(6)]
    for granted, given_back in enumerate((1, 0, 2, 3), start=2):
        await settle()
        assert [task.done() for task in tasks] == [number < granted for number in range(6)]
        permits.give_back(f"e{given_back}")
    assert all(await asyncio.gather(*tasks))


async def test_their_number_changes_at_once_and_holders_keep_theirs():
    permits = SwapPermits(1, LONG)
    await permits.resize(3)
    assert all([await permits.acquire(f"e{number}", SOON) for number in range(3)])
    assert not await permits.acquire("e3", SOON)
    await permits.resize(1)
    for number in range(2):
        permits.give_back(f"e{number}")
        assert not await permits.acquire("e3", SOON)
    permits.give_back("e2")
    assert await permits.acquire("e3", SOON)
    permits.give_back("e3")
    await permits.resize(2)
    await permits.resize(1)
    assert await permits.acquire("e0", SOON)
    assert not await permits.acquire("e1", SOON)
    waiting = asyncio.create_task(permits.acquire("e1", LONG))
    await settle()
    await permits.resize(2)
    assert await waiting


async def test_a_request_that_timed_out_gets_no_permit():
    permits = SwapPermits(1, LONG)
    assert await permits.acquire("e0", LONG)
    assert not await permits.acquire("e1", SOON)
    last = asyncio.create_task(permits.acquire("e2", LONG))
    await settle()
    permits.give_back("e0")
    assert await last
    assert not await permits.acquire("e1", SOON)


async def test_a_permit_given_to_a_caller_that_is_cancelled_goes_to_the_next():
    permits = SwapPermits(1, LONG)
    assert await permits.acquire("e0", LONG)
    cancelled = asyncio.create_task(permits.acquire("e1", LONG))
    last = asyncio.create_task(permits.acquire("e2", LONG))
    await settle()
    permits.give_back("e0")
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert await asyncio.wait_for(last, LONG)


async def test_the_permit_of_a_silent_holder_expires():
    permits = SwapPermits(1, SOON)
    assert await permits.acquire("dead", LONG)
    assert await permits.acquire("e1", LONG)


async def test_a_holder_that_asks_again_keeps_its_permit_and_takes_no_second_one():
    permits = SwapPermits(2, LONG)
    assert await permits.acquire("e0", LONG)
    assert await permits.acquire("e0", LONG)
    assert await permits.acquire("e1", LONG)
    assert not await permits.acquire("e2", SOON)

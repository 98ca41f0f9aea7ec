"""Which requests share a batch, and what each caller gets."""

import asyncio
import threading
from contextlib import asynccontextmanager

import pytest

from actors.reward_models.dynamic_batcher import DynamicBatcher

FOREVER = 3600.0


class Doubler:
    """Doubles numbers, remembers its batches, and can be held up."""

    def __init__(self):
        self.batches = []
        self.may_go = threading.Event()
        self.may_go.set()
        self.begun = asyncio.Event()

    def __call__(self, numbers):
        self.batches.append(numbers)
        self.loop.call_soon_threadsafe(self.begun.set)
        assert self.may_go.wait(10)
        if any(number < 0 for number in numbers):
            raise ValueError(f"negative in {numbers}")
        return [2 * number for number in numbers]


@asynccontextmanager
async def batching(**options):
    """Provide a doubler and the batcher before it, for 20 seconds at most."""
    doubler = Doubler()
    doubler.loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(20):
            yield doubler, DynamicBatcher(doubler, **{"size": 3, "wait": FOREVER, **options})
    finally:
        doubler.may_go.set()


async def test_a_full_batch_does_not_wait_and_everybody_gets_his_own_result():
    async with batching() as (doubler, batches):
        assert await asyncio.gather(*map(batches.submit, range(6))) == [0, 2, 4, 6, 8, 10]
        assert doubler.batches == [[0, 1, 2], [3, 4, 5]]


async def test_a_batch_that_is_not_full_goes_when_its_oldest_request_has_waited():
    async with batching(wait=0.01) as (doubler, batches):
        assert await asyncio.gather(*map(batches.submit, range(4))) == [0, 2, 4, 6]
        assert doubler.batches == [[0, 1, 2], [3]]


async def test_what_arrives_during_a_batch_makes_the_next():
    async with batching(wait=0.0) as (doubler, batches):
        doubler.may_go.clear()
        first = asyncio.create_task(batches.submit(1))
        await doubler.begun.wait()
        later = [asyncio.create_task(batches.submit(number)) for number in (2, 3)]
        await asyncio.sleep(0)
        doubler.may_go.set()
        assert await asyncio.gather(first, *later) == [2, 4, 6]
        assert doubler.batches == [[1], [2, 3]]


async def test_an_error_reaches_all_of_its_batch_and_nobody_else():
    async with batching() as (_doubler, batches):
        result = await asyncio.gather(
            *map(batches.submit, (1, -2, 3, 4, 5, 6)), return_exceptions=True
        )
        assert [str(error) for error in result[:3]] == ["negative in [1, -2, 3]"] * 3
        assert result[3:] == [8, 10, 12]


async def test_a_request_that_is_given_up_is_left_out_of_its_batch():
    async with batching() as (doubler, batches):
        given_up = asyncio.create_task(batches.submit(1))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.wait([given_up])
        assert await asyncio.gather(batches.submit(2), batches.submit(3)) == [4, 6]
        assert doubler.batches == [[2, 3]]


async def test_a_batch_that_everybody_gave_up_is_not_computed():
    async with batching(wait=0.02) as (doubler, batches):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(batches.submit(1), 0.001)
        assert await batches.submit(2) == 4
        assert doubler.batches == [[2]]

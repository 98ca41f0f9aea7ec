"""How a process that hangs is told from one that is late."""

import asyncio

import pytest

from headway.hang_detection import until_silent


@pytest.mark.parametrize(
    ("answers", "deadlines"),
    [([], 2), ([True, True], 2), ([True, False, True], 3), ([False, True, False, True], 4)],
)
async def test_a_process_hangs_once_it_misses_two_deadlines_in_a_row(answers, deadlines):
    """It answers the next pings at once (True) or never (False), and all after them never."""
    left, loop = iter(answers), asyncio.get_running_loop()

    async def ping():
        if not next(left, False):
            await asyncio.Event().wait()

    began = loop.time()
    await until_silent(ping, 0.1, interval=0.0)
    assert loop.time() - began >= deadlines * 0.05


async def test_the_error_of_a_call_is_raised():
    async def ping():
        raise ConnectionError

    with pytest.raises(ConnectionError):
        await until_silent(ping)

"""How a process that hangs is told from one that is late."""

import asyncio

import pytest

from headway.hang_detection import until_silent


class Process:
    """Answers the next asks at once (True) or never (False), and all after them never."""

    def __init__(self, *answers):
        self.answers = list(answers)

    async def ping(self):
        if not (self.answers and self.answers.pop(0)):
            await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("answers", "deadlines"),
    [([], 2), ([True, True], 2), ([True, False, True], 3), ([False, True, False, True], 4)],
)
def test_a_process_hangs_once_it_misses_two_deadlines_in_a_row(answers, deadlines):
    async def seconds():
        loop = asyncio.get_running_loop()
        began = loop.time()
        await until_silent(Process(*answers).ping, 0.1, interval=0.0)
        return loop.time() - began

    assert asyncio.run(seconds()) >= deadlines * 0.05


def test_the_error_of_a_call_is_raised():
    async def ping():
        raise ConnectionError

    with pytest.raises(ConnectionError):
        asyncio.run(until_silent(ping))

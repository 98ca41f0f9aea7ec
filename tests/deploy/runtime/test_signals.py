"""Interrupts: what they reach, and what they leave alone."""

import asyncio
import os
import signal

import pytest

from deploy.runtime.signals import Interrupts, deferred, raise_interrupts


@pytest.fixture(autouse=True)
def handlers():
    """Restore the signal handlers of the test runner."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    raise_interrupts()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_is_raised_at_once_or_behind_the_block_that_defers_it(number):
    with pytest.raises(KeyboardInterrupt):
        send(number)
    reached = []
    with pytest.raises(KeyboardInterrupt), deferred():  # noqa: PT012
        send(number)
        reached.append("end of the block")
    assert reached == ["end of the block"]
    with pytest.raises(KeyboardInterrupt):
        send(number)


def test_an_error_in_the_block_goes_before_the_interrupt():
    with pytest.raises(ValueError, match="first"), deferred():  # noqa: PT012
        send(signal.SIGTERM)
        raise ValueError("first")


def test_in_an_event_loop_the_first_interrupt_asks_and_the_second_insists():
    async def main():
        interrupts = Interrupts()
        send(signal.SIGTERM)
        await asyncio.wait_for(interrupts.asked.wait(), 5)
        assert not interrupts.insisted.is_set()
        send(signal.SIGINT)
        await asyncio.wait_for(interrupts.insisted.wait(), 5)

    asyncio.run(main())

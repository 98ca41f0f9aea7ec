"""Interrupts: what they reach, and what they leave alone."""

import asyncio
import os
import signal
import subprocess

import pytest

from deploy.runtime.signals import (
    FORWARDED,
    Interrupts,
    Received,
    deferred,
    raise_interrupts,
    without_hangups,
)


@pytest.fixture(autouse=True)
def handlers():
    """Restore the signal handlers of the test runner."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    raise_interrupts()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
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


async def test_in_an_event_loop_the_first_interrupt_asks_and_the_second_insists():
    interrupts = Interrupts()
    send(signal.SIGTERM)
    await asyncio.wait_for(interrupts.asked.wait(), 5)
    assert not interrupts.insisted.is_set()
    send(signal.SIGINT)
    await asyncio.wait_for(interrupts.insisted.wait(), 5)


@pytest.mark.parametrize("first", [signal.SIGHUP, signal.SIGTERM])
async def test_a_lost_terminal_asks_however_often_it_tells_and_does_not_insist(first):
    interrupts = Interrupts()
    send(first)
    await asyncio.wait_for(interrupts.asked.wait(), 5)
    for number in (signal.SIGHUP, signal.SIGHUP):
        send(number)
    await asyncio.sleep(0)
    if first == signal.SIGHUP:
        send(signal.SIGTERM)  # as where a session ends
        await asyncio.sleep(0)
    assert not interrupts.insisted.is_set()
    send(signal.SIGTERM)
    await asyncio.wait_for(interrupts.insisted.wait(), 5)


def test_a_hangup_is_ignored_where_it_was_and_never_reaches_what_a_block_starts():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    raise_interrupts()
    with deferred():
        send(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    with without_hangups():
        started = subprocess.Popen(["sleep", "600"])
    started.send_signal(signal.SIGHUP)
    started.send_signal(signal.SIGTERM)
    assert started.wait(60) == -signal.SIGTERM


def test_an_interrupt_that_comes_directly_and_from_the_parent_counts_once():
    received = Received()
    assert not received.any()
    own, passed_on = signal.SIGTERM, FORWARDED[signal.SIGTERM]
    hangup, hangup_passed_on = signal.SIGHUP, FORWARDED[signal.SIGHUP]
    order = [own, passed_on, passed_on, hangup_passed_on, signal.SIGINT, own, hangup, hangup]
    new = [True, False, True, True, False, True, False, True]
    assert [received.is_new(number) for number in order] == new
    assert received.any()

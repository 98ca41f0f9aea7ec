"""Interrupts: Ctrl-C, SIGTERM and the loss of the terminal mean the same, and may be deferred.

Outside an event loop an interrupt is a KeyboardInterrupt, which `deferred` keeps out of blocks that
would leave processes running. Inside one it is an event, so that the loop decides how to end.
"""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


def interrupts() -> list[signal.Signals]:
    """Return the signals that interrupt; SIGHUP is none where it is ignored, as nohup has it."""
    heeded = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if heeded else [])]


def raise_interrupts() -> None:
    """Turn every interrupt into a KeyboardInterrupt; to be called again after an event loop."""
    for number in interrupts():
        signal.signal(number, signal.default_int_handler)


@contextmanager
def without_hangups() -> Iterator[None]:
    """Keep SIGHUP from the processes that are started in the block, for as long as they live.

    A terminal that is lost sends it to all of them, and only this one can end them in good order.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def deferred() -> Iterator[None]:
    """Finish the block first; an interrupt during it raises KeyboardInterrupt at its end."""
    received: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.signal(number, note) or signal.SIG_DFL for number in interrupts()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        raise KeyboardInterrupt


class Interrupts:
    """Interrupts as events of the running event loop, which must be the main thread's."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        """Set by the first interrupt: end in good order."""
        self.insisted = asyncio.Event()
        """Set by the second interrupt: end at once. SIGHUP does not count, since a terminal that
        is lost may send several, and others follow it where a session ends."""
        self._by_user = False
        for number in interrupts():
            asyncio.get_running_loop().add_signal_handler(number, self._note, number)

    def _note(self, number: int) -> None:
        self.asked.set()
        if number == signal.SIGHUP:
            return
        if self._by_user:
            self.insisted.set()
        self._by_user = True

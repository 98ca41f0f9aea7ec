"""Interrupts: Ctrl-C, SIGTERM and the loss of the terminal mean the same, and may be deferred.

Outside an event loop an interrupt is a KeyboardInterrupt, which `deferred` keeps out of blocks that
would leave processes running. Inside one it is an event, so that the loop decides how to end.

The parent of a session passes interrupts on by signals of their own (`FORWARDED`), so that one
that a terminal sends to both processes counts once.
"""

import asyncio
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

FORWARDED = {
    signal.SIGINT: int(signal.SIGRTMIN),
    signal.SIGTERM: int(signal.SIGRTMIN),
    signal.SIGHUP: signal.SIGRTMIN + 1,
}
"""The signal by which a parent passes on each interrupt."""
HANGUPS = (signal.SIGHUP, FORWARDED[signal.SIGHUP])


class Received:
    """Counts the interrupts that a process receives, directly and passed on by its parent."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[bool, bool]] = Counter()
        self._known: Counter[bool] = Counter()

    def is_new(self, number: int) -> bool:
        """Count a signal; return False if it came before on the other way.

        Handlers may interrupt one another anywhere: then one of them is new.
        """
        hangup, forwarded = number in HANGUPS, number in FORWARDED.values()
        self._counts[hangup, forwarded] += 1
        count = max(self._counts[hangup, forwarded], self._counts[hangup, not forwarded])
        new = count > self._known[hangup]
        self._known[hangup] = max(count, self._known[hangup])
        return new

    def any(self) -> bool:
        """Return True once there was one."""
        return bool(self._counts)


received = Received()
"""The interrupts of this process."""


def interrupts() -> list[int]:
    """Return the signals that interrupt; SIGHUP is none where it is ignored, as nohup has it."""
    heeded = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    direct = [number for number in FORWARDED if number != signal.SIGHUP or heeded]
    return [*direct, *dict.fromkeys(FORWARDED.values())]


def raise_interrupts() -> None:
    """Turn every interrupt into a KeyboardInterrupt; to be called again after an event loop."""
    for number in interrupts():
        signal.signal(number, _raise)


def _raise(number: int, _frame: FrameType | None) -> None:
    if received.is_new(number):
        raise KeyboardInterrupt


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
    deferring: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        if received.is_new(number):
            deferring.append(number)

    before = {number: signal.signal(number, note) or signal.SIG_DFL for number in interrupts()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if deferring:
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
        if not received.is_new(number):
            return
        self.asked.set()
        if number in HANGUPS:
            return
        if self._by_user:
            self.insisted.set()
        self._by_user = True

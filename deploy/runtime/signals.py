"""Interrupts of the user: Ctrl-C and SIGTERM mean the same, and may be deferred.

Outside an event loop an interrupt is a KeyboardInterrupt, which `deferred` keeps out of blocks that
would leave processes running. Inside one it is an event, so that the loop decides how to end.
"""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def raise_interrupts() -> None:
    """Turn every interrupt into a KeyboardInterrupt; to be called again after an event loop."""
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler)


@contextmanager
def deferred() -> Iterator[None]:
    """Finish the block first; an interrupt during it raises KeyboardInterrupt at its end."""
    received: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.signal(number, note) or signal.SIG_DFL for number in SIGNALS}
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
        """Set by the second interrupt: end at once."""
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._note)

    def _note(self) -> None:
        (self.insisted if self.asked.is_set() else self.asked).set()

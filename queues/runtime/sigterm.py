"""Hears SIGTERM in an asynchronous Ray actor, where Ray's own handler would let the actor hang."""

import asyncio
import signal
from collections.abc import Callable
from functools import partial
from types import FrameType, FunctionType

_calls: list[Callable[[], object]] = []
"""What this process does at SIGTERM."""


def _at_sigterm(signum: int, frame: FrameType | None) -> None:
    from queues.runtime import sigterm  # the globals of this function are those of Ray's

    for call in sigterm._calls:
        call()


def call_at_sigterm(work: Callable[[], None]) -> None:
    """Call `work` in this event loop at SIGTERM, instead of what Ray does.

    A handler may only be set in the main thread, in which Ray runs nothing of such an actor; so the
    function that is the handler gets another body.
    """
    loop = asyncio.get_running_loop()
    handler = signal.getsignal(signal.SIGTERM)
    if isinstance(handler, FunctionType) and not handler.__code__.co_freevars:
        _calls[:] = [partial(loop.call_soon_threadsafe, work)]
        handler.__code__ = _at_sigterm.__code__

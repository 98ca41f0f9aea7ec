"""Runs a blocking call in a daemon thread, so that a hung disk blocks neither event loop nor exit.

A thread of `asyncio.to_thread` is joined at interpreter exit; a daemon thread is not.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import TypeVar

T = TypeVar("T")
LOOPS_OWN = StopIteration, CancelledError


async def run_in_daemon_thread(work: Callable[[], T], *, name: str = "blocking-call") -> T:
    """Call `work` in a new daemon thread, and return or raise what it returns or raises.

    The call starts at once and cannot be interrupted: when this coroutine is cancelled, the thread
    goes on and its result is dropped. The caller sets the deadline. An exception that an event loop
    takes for its own, such as SystemExit, CancelledError or StopIteration, is raised in a
    RuntimeError.
    """
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001  (raised in the caller)
            ends = not isinstance(error, Exception) or isinstance(error, LOOPS_OWN)
            outcome.set_exception(RuntimeError(f"ended by {error!r}") if ends else error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(outcome)

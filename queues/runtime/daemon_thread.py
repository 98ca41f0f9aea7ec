"""Runs a blocking call in a daemon thread, so that a hung disk blocks neither event loop nor exit.

A thread of `asyncio.to_thread` is joined at interpreter exit; a daemon thread is not.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


async def run_in_daemon_thread(work: Callable[[], T], *, name: str = "blocking-call") -> T:
    """Call `work` in a new daemon thread, and return or raise what it returns or raises.

    The call starts at once and cannot be interrupted: when this coroutine is cancelled, the thread
    goes on and its result is dropped. The caller sets the deadline.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[tuple[T | None, Exception | None]] = loop.create_future()

    def finish(result: T | None, error: Exception | None) -> None:
        if not ended.done():
            ended.set_result((result, error))

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except Exception as raised:  # noqa: BLE001  (raised again below)
            error = raised
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(finish, result, error)

    threading.Thread(target=run, name=name, daemon=True).start()
    result, error = await ended
    if error is not None:
        raise error
    return result  # type: ignore[return-value]

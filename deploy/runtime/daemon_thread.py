"""Work that may hang, such as a disk's, beside the event loop: neither it nor the exit waits."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


async def run_in_daemon_thread(work: Callable[[], T]) -> T:
    """What `work` returns or raises, in a thread of its own; the caller sets the deadline.

    Begins at once, and goes on where the caller is cancelled.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def answer(set_: Callable[[Any], None], value: object) -> None:
        with suppress(RuntimeError):  # nobody is there any more
            loop.call_soon_threadsafe(lambda: None if done.done() else set_(value))

    def run() -> None:
        try:
            result = work()
        except Exception as error:  # noqa: BLE001  (whoever waits gets it)
            answer(done.set_exception, error)
        else:
            answer(done.set_result, result)

    threading.Thread(target=run, name="aside", daemon=True).start()
    return await done

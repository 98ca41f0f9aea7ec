"""Calls functions of the user's, blocking or not, without ever blocking the event loop."""

import asyncio
import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


async def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a coroutine function, or of a plain one that runs in a thread of its own.

    A plain function cannot be interrupted: when this call is cancelled it is left behind, and its
    result is dropped. Each has its own daemon thread, so that those left behind keep neither other
    calls nor the end of the process waiting.
    """
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  (an object with an async __call__)
    ):
        return await function(*arguments)
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[tuple[Any, Exception | None]] = loop.create_future()

    def finish(result: Any, error: Exception | None) -> None:
        if not ended.done():
            ended.set_result((result, error))

    def work() -> None:
        result, error = None, None
        try:
            result = function(*arguments)
        except Exception as raised:  # noqa: BLE001  (raised again by the caller)
            error = raised
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(finish, result, error)

    threading.Thread(target=work, name=f"call-{function!r}", daemon=True).start()
    result, error = await ended
    if error is not None:
        raise error
    return await result if inspect.isawaitable(result) else result

"""Calls user code, blocking or not, without blocking the event loop."""

import asyncio
import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


async def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Await a coroutine function, or run a plain function in a daemon thread of its own.

    A plain function cannot be interrupted: when this call is cancelled, it goes on and its result
    is dropped. It delays neither other calls nor the end of the process.
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
        except Exception as raised:  # noqa: BLE001  (raised again below)
            error = raised
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(finish, result, error)

    threading.Thread(target=work, name=f"call-{function!r}", daemon=True).start()
    result, error = await ended
    if error is not None:
        raise error
    return await result if inspect.isawaitable(result) else result

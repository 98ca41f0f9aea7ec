"""Calls functions of the user, blocking or not, without blocking the event loop."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from queues.runtime.daemon_thread import run_in_daemon_thread


def is_coroutine(function: Callable[..., Any]) -> bool:
    """Return True for a coroutine function, an object with such a `__call__`, or their partial."""
    function = function.func if isinstance(function, partial) else function
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  (an object with an async __call__)
    )


async def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a coroutine function, or of a plain one that runs in a daemon thread.

    If this call is cancelled, the thread goes on and its result is dropped.
    """
    if is_coroutine(function):
        return await function(*arguments)
    result = await run_in_daemon_thread(partial(function, *arguments), name=f"call-{function!r}")
    return await result if inspect.isawaitable(result) else result

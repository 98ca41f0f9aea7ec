"""Hang detection: ping a process at intervals, until it misses two deadlines in a row."""

import asyncio
from collections.abc import Awaitable, Callable

SILENT_SECONDS = 15.0
"""A process that does not answer for so long hangs."""
LOADING_SILENT_SECONDS = 60.0
"""Longest silence of a process that loads, which code of libraries keeps from answering."""
PING_SECONDS = 2.0
"""Interval at which a process is asked."""


async def until_silent(
    ping: Callable[[], Awaitable[object]],
    silent_seconds: float = SILENT_SECONDS,
    *,
    interval: float = PING_SECONDS,
    placed: bool = True,
) -> None:
    """Return once the process that `ping` asks has not answered for `silent_seconds`.

    It has to miss two deadlines in a row, since the process that asks may have been stopped. An
    error of `ping` is raised. If Ray may not have `placed` the process yet, the time begins at its
    first answer.
    """
    if not placed:
        await ping()
    late = 0
    while late < 2:
        try:
            async with asyncio.timeout(silent_seconds / 2):
                await ping()
        except TimeoutError:
            late += 1
        else:
            late = 0
            await asyncio.sleep(interval)

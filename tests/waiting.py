"""Waits for conditions, each with a deadline."""

import asyncio
import time
from collections.abc import Callable

INTERVAL_SECONDS = 0.01


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait for a condition of another thread or process."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(INTERVAL_SECONDS)


async def reached(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait for a condition of another task."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  (what it waits for has no event)
            await asyncio.sleep(INTERVAL_SECONDS)

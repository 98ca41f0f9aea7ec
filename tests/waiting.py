"""Waits for conditions, each with a deadline."""

import asyncio
import subprocess
import time
from collections.abc import Callable
from typing import Any

INTERVAL_SECONDS = 0.01


def until(
    condition: Callable[[], Any],
    seconds: float = 60.0,
    *,
    process: "subprocess.Popen[str] | None" = None,
    output: Callable[[], str] = lambda: "",
) -> Any:
    """Wait until a condition of another thread or process is true, and return what it returns.

    `process` has to live meanwhile; `output` returns what it prints, if that is not to a pipe.
    """
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        if process is not None and process.poll() is not None:
            raise AssertionError(output() or (process.stdout and process.stdout.read()))
        assert time.monotonic() < deadline, f"it never came true: {output()[-3000:]}"
        time.sleep(INTERVAL_SECONDS)
    return answer


async def reached(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait for a condition of another task."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  (what it waits for has no event)
            await asyncio.sleep(INTERVAL_SECONDS)

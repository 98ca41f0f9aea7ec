"""Callers that wait for one kind of change, in one event loop."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class LongPolls:
    """The calls that one kind of change may answer; `check_open` raises once none may be."""

    def __init__(self, check_open: Callable[[], None]) -> None:
        self._check_open = check_open
        self._waiting: dict[asyncio.Future[None], str | None] = {}
        """Waiting calls in the order of their arrival, with the names of the callers."""

    async def until(
        self, decide: Callable[[], T | None], timeout: float, *, name: str | None = None
    ) -> T | None:
        """Call `decide` now and after every change until it returns something other than None.

        Returns None after `timeout` seconds. `name` is that of the caller, for `wake`.
        """
        try:
            async with asyncio.timeout(timeout):
                while True:
                    self._check_open()
                    if (decided := decide()) is not None:
                        return decided
                    changed = asyncio.get_running_loop().create_future()
                    self._waiting[changed] = name
                    try:
                        await changed
                    finally:
                        del self._waiting[changed]
        except TimeoutError:
            return None

    def wake(self, name: str | None = None) -> None:
        """Let every waiting call, or those of this name, decide again, in order."""
        for changed, waiting in self._waiting.items():
            if name in (None, waiting) and not changed.done():
                changed.set_result(None)

    def wake_at(self, moment: float) -> None:
        """Wake as soon as `time.monotonic()` has reached `moment`.

        An event loop may call back too early: uvloop, which Ray uses, counts in milliseconds from
        the beginning of an iteration. Callers woken before the moment would not be woken again.
        """
        if (left := moment - time.monotonic()) > 0:
            asyncio.get_running_loop().call_later(left, self.wake_at, moment)
        else:
            self.wake()

"""Callers that wait for one kind of change, in one event loop.

What to wait for, and when it has changed, is decided by `queues.broker`.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class LongPolls:
    """The calls that one kind of change may answer.

    Args:
        check_open: Raises once no call may be answered any more.
    """

    def __init__(self, check_open: Callable[[], None]) -> None:
        self._check_open = check_open
        self._changed = asyncio.Condition()

    async def until(self, decide: Callable[[], T | None], timeout: float) -> T | None:
        """What `decide` returns, asked again after every change until it is not None.

        None at the timeout, in seconds.
        """
        try:
            async with asyncio.timeout(timeout), self._changed:
                while True:
                    self._check_open()
                    if (decided := decide()) is not None:
                        return decided
                    await self._changed.wait()
        except TimeoutError:
            return None

    async def wake(self) -> None:
        """Something has changed: everyone who waits asks again."""
        async with self._changed:
            self._changed.notify_all()

"""Callers that wait for one kind of change, in one event loop.

What to wait for, and when it has changed, is decided by `queues.broker.broker`.
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
        self._waiting: dict[asyncio.Future[None], str | None] = {}
        """Those who wait, in the order of their coming, and what they are named."""
        self._alarms: set[asyncio.Task[None]] = set()

    async def until(
        self, decide: Callable[[], T | None], timeout: float, *, name: str | None = None
    ) -> T | None:
        """What `decide` returns, asked again after every change until it is not None.

        None at the timeout, in seconds.

        Args:
            decide: Asked at once and without awaiting.
            timeout: Seconds.
            name: Of the caller, where some changes concern only it.
        """
        try:
            async with asyncio.timeout(timeout):
                while True:
                    self._check_open()
                    if (decided := decide()) is not None:
                        return decided
                    await self._change(name)
        except TimeoutError:
            return None

    async def wake(self, name: str | None = None) -> None:
        """Something has changed: everyone who waits, or of this name, asks again, in order."""
        for changed, waiting in self._waiting.items():
            if name in (None, waiting) and not changed.done():
                changed.set_result(None)

    async def _change(self, name: str | None) -> None:
        changed = asyncio.get_running_loop().create_future()
        self._waiting[changed] = name
        try:
            await changed
        finally:
            del self._waiting[changed]

    def wake_after(self, seconds: float) -> None:
        """Wake later: what was refused now is allowed then, without any other change."""
        alarm = asyncio.create_task(self._wake_after(seconds))
        self._alarms.add(alarm)
        alarm.add_done_callback(self._alarms.discard)

    def stop(self) -> None:
        """Nobody is woken later any more."""
        for alarm in self._alarms:
            alarm.cancel()

    async def _wake_after(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self.wake()

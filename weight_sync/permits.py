"""Swap permits: a limited number of engines may swap at a time, in the order of their requests."""

import asyncio
from collections import deque


class SwapPermits:
    """A counting semaphore whose permits expire, so that a dead engine delays nobody.

    Belongs to one event loop. A permit ends `seconds` after it was granted or renewed.
    """

    def __init__(self, count: int, seconds: float) -> None:
        self._count = count
        self._seconds = seconds
        self._held: dict[str, asyncio.TimerHandle] = {}
        self._waiting: deque[tuple[str, asyncio.Future[None]]] = deque()

    async def acquire(self, holder: str, timeout: float) -> bool:
        """Wait at most `timeout` seconds for a permit; True if it was granted.

        A holder that asks again keeps its permit, for the full lifetime.
        """
        if holder in self._held or (len(self._held) < self._count and not self._waiting):
            self._grant(holder)
            return True
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        request = (holder, granted)
        self._waiting.append(request)
        try:
            async with asyncio.timeout(timeout):
                await granted
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self.give_back(holder)
            raise
        finally:
            if request in self._waiting:
                self._waiting.remove(request)
        return not granted.cancelled()

    def give_back(self, holder: str) -> None:
        """End a permit, if the holder has one, and grant it to the next in the queue."""
        timer = self._held.pop(holder, None)
        if timer is None:
            return
        timer.cancel()
        while self._waiting and len(self._held) < self._count:
            next_holder, granted = self._waiting.popleft()
            if not granted.done():
                self._grant(next_holder)
                granted.set_result(None)

    def _grant(self, holder: str) -> None:
        if earlier := self._held.get(holder):
            earlier.cancel()
        loop = asyncio.get_running_loop()
        self._held[holder] = loop.call_later(self._seconds, self.give_back, holder)

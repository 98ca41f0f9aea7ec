"""Swap permits: a limited number of engines may swap at a time, in the order of their requests."""

import asyncio

from weight_sync.progress import LEAST_SWAPPED_BYTES_PER_SECOND, allowance


class SwapPermits:
    """A semaphore whose permits end `seconds` after they were granted or renewed.

    A permit to load `nbytes` lasts so much longer (`weight_sync.progress.allowance`).
    """

    def __init__(self, count: int, seconds: float) -> None:
        self._count, self._seconds = count, seconds
        self._free = asyncio.Semaphore(count)
        self._surplus = 0
        """Permits that end when they are given back, since `count` was lowered."""
        self._held: dict[str, asyncio.TimerHandle] = {}

    async def acquire(self, holder: str, timeout: float, nbytes: int = 0) -> bool:
        """Wait at most `timeout` seconds for a permit; True if it was granted.

        A holder that asks again keeps its permit, for the full lifetime.
        """
        if holder not in self._held:
            try:
                async with asyncio.timeout(timeout):
                    await self._free.acquire()
            except TimeoutError:
                return False
            if holder in self._held:  # another request of this holder was granted meanwhile
                self._release()
        if earlier := self._held.get(holder):
            earlier.cancel()
        loop = asyncio.get_running_loop()
        seconds = allowance(self._seconds, nbytes, LEAST_SWAPPED_BYTES_PER_SECOND)
        self._held[holder] = loop.call_later(seconds, self.give_back, holder)
        return True

    def give_back(self, holder: str) -> None:
        """End a permit, if the holder has one, and grant it to the next in the queue."""
        timer = self._held.pop(holder, None)
        if timer is not None:
            timer.cancel()
            self._release()

    async def resize(self, count: int) -> None:
        """Change the number of permits; holders beyond a lower one keep theirs until its end."""
        change, self._count = count - self._count, count
        for _ in range(change):
            self._release()
        for _ in range(-change):
            self._surplus += 1
            if not self._free.locked():
                self._surplus -= 1
                await self._free.acquire()

    def _release(self) -> None:
        if self._surplus:
            self._surplus -= 1
        else:
            self._free.release()

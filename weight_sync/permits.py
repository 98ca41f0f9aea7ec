"""Who may swap: so many engines at a time, in the order in which their present waits began.

A plain object that belongs to one event loop. A permit that its holder does not give back in
time is void, so that a dead engine holds nobody up.
"""

import asyncio
from collections import deque


class SwapPermits:
    """So many permits, and who waits for one.

    Args:
        count: Permits that may be out at a time.
        seconds: How long one outlives a silent holder.
    """

    def __init__(self, count: int, seconds: float) -> None:
        self._count = count
        self._seconds = seconds
        self._held: dict[str, asyncio.TimerHandle] = {}
        self._waiting: deque[tuple[str, asyncio.Future[None]]] = deque()

    async def acquire(self, holder: str, timeout: float) -> bool:
        """Waits for a permit; a holder that asks again keeps its own, for the full time again.

        Args:
            holder: Who asks.
            timeout: Seconds to wait for at most.

        Returns:
            Whether the permit was given.
        """
        if holder in self._held or (len(self._held) < self._count and not self._waiting):
            self._give(holder)
            return True
        place = (holder, asyncio.get_running_loop().create_future())
        self._waiting.append(place)
        given = place[1]
        try:
            async with asyncio.timeout(timeout):
                await given
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            if given.done() and not given.cancelled():
                self.give_back(holder)
            raise
        finally:
            if place in self._waiting:
                self._waiting.remove(place)
        return not given.cancelled()

    def give_back(self, holder: str) -> None:
        """Ends a permit, if there is one; the next who waits gets it."""
        timer = self._held.pop(holder, None)
        if timer is None:
            return
        timer.cancel()
        while self._waiting and len(self._held) < self._count:
            next_holder, given = self._waiting.popleft()
            if not given.done():
                self._give(next_holder)
                given.set_result(None)

    def _give(self, holder: str) -> None:
        if earlier := self._held.get(holder):
            earlier.cancel()
        loop = asyncio.get_running_loop()
        self._held[holder] = loop.call_later(self._seconds, self.give_back, holder)

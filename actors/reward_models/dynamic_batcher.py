"""Gathers concurrent requests into batches, which are computed one after the other in a thread.

A batch begins when it is full, or when its oldest request has waited long enough, others included.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

Request = TypeVar("Request")
Result = TypeVar("Result")


class DynamicBatcher(Generic[Request, Result]):
    """One computation shared by many callers of one event loop.

    `compute` is called in a thread, one call at a time, with at most `size` requests; none waits
    longer than `wait` seconds for others to join it.
    """

    def __init__(
        self, compute: Callable[[list[Request]], Sequence[Result]], *, size: int, wait: float
    ) -> None:
        self._compute = compute
        self._size, self._wait = size, wait
        self._waiting: list[tuple[Request, asyncio.Future[Result], float]] = []
        """Requests, their answers, and since when they wait, by the event loop's clock."""
        self._arrived = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None

    async def submit(self, request: Request) -> Result:
        """Return the result of one request, or raise what `compute` raised for its batch.

        The caller sets the deadline; a request that is cancelled before its batch begins is left
        out.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Result] = loop.create_future()
        self._waiting.append((request, answer, loop.time()))
        self._arrived.set()
        if self._worker is None or self._worker.done():
            self._worker = loop.create_task(self._work())
        return await answer

    async def _work(self) -> None:
        """Compute batches until no request waits."""
        while self._waiting:
            await self._gather()
            batch = {a: r for r, a, _ in self._waiting[: self._size] if not a.done()}
            del self._waiting[: self._size]
            if batch:
                await self._answer(batch)

    async def _gather(self) -> None:
        """Wait for a full batch, or for the deadline of the oldest request."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._waiting[0][2] + self._wait):
                while len(self._waiting) < self._size:
                    self._arrived.clear()
                    await self._arrived.wait()

    async def _answer(self, batch: dict[asyncio.Future[Result], Request]) -> None:
        try:
            results = await asyncio.to_thread(self._compute, [*batch.values()])
        except Exception as error:  # noqa: BLE001  (raised again by every caller)
            for answer in batch:
                if not answer.done():
                    answer.set_exception(error)
            return
        for answer, result in zip(batch, results, strict=True):
            if not answer.done():
                answer.set_result(result)

"""Gathers concurrent requests into batches, which are computed one after the other in a thread.

A batch begins when it is full, or when its oldest request has waited long enough; the time in which
another batch is computed counts as waiting.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

Request = TypeVar("Request")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Request(Generic[Request, Result]):
    request: Request
    answer: "asyncio.Future[Result]"
    since: float
    """In seconds of the event loop's clock."""


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
        self._waiting: list[_Request[Request, Result]] = []
        self._arrived = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None

    async def submit(self, request: Request) -> Result:
        """Return the result of one request, or raise what `compute` raised for its batch.

        The caller sets the deadline; a request that is cancelled before its batch begins is left
        out.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Result] = loop.create_future()
        self._waiting.append(_Request(request, answer, loop.time()))
        self._arrived.set()
        if self._worker is None or self._worker.done():
            self._worker = loop.create_task(self._work())
        return await answer

    async def _work(self) -> None:
        """Compute batches until no request waits."""
        while self._waiting:
            await self._gather()
            batch = [w for w in self._waiting[: self._size] if not w.answer.done()]
            del self._waiting[: self._size]
            if batch:
                await self._answer(batch)

    async def _gather(self) -> None:
        """Wait for a full batch, or for the deadline of the oldest request."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._waiting[0].since + self._wait):
                while len(self._waiting) < self._size:
                    self._arrived.clear()
                    await self._arrived.wait()

    async def _answer(self, batch: list[_Request[Request, Result]]) -> None:
        try:
            results = await asyncio.to_thread(self._compute, [w.request for w in batch])
        except Exception as error:  # noqa: BLE001  (raised again by every caller)
            for waiting in batch:
                if not waiting.answer.done():
                    waiting.answer.set_exception(error)
            return
        for waiting, result in zip(batch, results, strict=True):
            if not waiting.answer.done():
                waiting.answer.set_result(result)

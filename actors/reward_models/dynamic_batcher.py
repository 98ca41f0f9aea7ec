"""Gathers concurrent requests into batches, which are computed one after the other in a thread.

A batch is begun when it is full, or when its oldest request has waited long enough; what arrives
while one is computed has waited by the time that it ends. Leaves out what is computed.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

Request = TypeVar("Request")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Waiting(Generic[Request, Result]):
    request: Request
    answer: "asyncio.Future[Result]"
    since: float
    """In seconds of the event loop's clock."""


class MicroBatches(Generic[Request, Result]):
    """One computation shared by many callers of one event loop.

    Args:
        compute: The results of some requests, in their order; runs in a thread, never twice at
            once.
        size: Most requests of a batch.
        wait: Seconds that a request waits at most for others to join it.
    """

    def __init__(
        self, compute: Callable[[list[Request]], Sequence[Result]], *, size: int, wait: float
    ) -> None:
        self._compute = compute
        self._size, self._wait = size, wait
        self._waiting: list[_Waiting[Request, Result]] = []
        self._arrived = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None

    async def submit(self, request: Request) -> Result:
        """The result of one request.

        The caller sets the deadline; a request that is cancelled before its batch begins is left
        out of it.

        Raises:
            Exception: What `compute` raised for its batch.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Result] = loop.create_future()
        self._waiting.append(_Waiting(request, answer, loop.time()))
        self._arrived.set()
        if self._worker is None or self._worker.done():
            self._worker = loop.create_task(self._work())
        return await answer

    async def _work(self) -> None:
        """Computes until nobody waits."""
        while self._waiting:
            await self._gather()
            batch = [w for w in self._waiting[: self._size] if not w.answer.done()]
            del self._waiting[: self._size]
            if batch:
                await self._answer(batch)

    async def _gather(self) -> None:
        """Waits for a full batch, or for the deadline of the oldest request."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._waiting[0].since + self._wait):
                while len(self._waiting) < self._size:
                    self._arrived.clear()
                    await self._arrived.wait()

    async def _answer(self, batch: list[_Waiting[Request, Result]]) -> None:
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

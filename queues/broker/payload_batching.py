"""Joint validation of payloads that arrive in different messages, in the event loop.

The cost of a validation is mostly per call and not per row, and higher in a thread beside a busy
event loop than in the loop itself. Large payloads get a thread each.
"""

import asyncio
from collections.abc import Sequence

from queues import schema
from queues.errors import SchemaError
from queues.records import Payload, Summary

BATCH_BYTES = 2**20
"""Bytes that are validated before the event loop goes on with other work."""
Results = list[Summary | SchemaError]
Arrival = tuple[Sequence[Payload], "asyncio.Future[Results]"]


class PayloadBatching:
    """Summarises payloads; belongs to one event loop.

    Args:
        batch_bytes: Bytes that are validated together; a larger arrival is validated alone.
    """

    def __init__(self, batch_bytes: int = BATCH_BYTES) -> None:
        self._batch_bytes = batch_bytes
        self._arrivals: list[Arrival] = []

    async def summarize(self, payloads: Sequence[Payload]) -> Results:
        """Return what `schema.summarize_many` returns."""
        if max(map(len, payloads), default=0) > schema.SMALL_BYTES:
            return await asyncio.to_thread(schema.summarize_many, payloads)
        loop = asyncio.get_running_loop()
        results: asyncio.Future[Results] = loop.create_future()
        self._arrivals.append((payloads, results))
        if len(self._arrivals) == 1:
            loop.call_soon(self._summarize_batch)
        return await results

    def _summarize_batch(self) -> None:
        """Answer the earliest arrivals, and schedule the next batch."""
        count, size = 0, 0
        while count < len(self._arrivals) and (not count or size < self._batch_bytes):
            size += sum(map(len, self._arrivals[count][0]))
            count += 1
        batch, self._arrivals = self._arrivals[:count], self._arrivals[count:]
        if self._arrivals:
            asyncio.get_running_loop().call_soon(self._summarize_batch)
        try:
            results = schema.summarize_many([x for payloads, _ in batch for x in payloads])
        except Exception as error:  # noqa: BLE001  (raised in every caller)
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        first = 0
        for payloads, future in batch:
            if not future.done():
                future.set_result(results[first : first + len(payloads)])
            first += len(payloads)

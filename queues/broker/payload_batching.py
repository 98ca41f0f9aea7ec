"""Payloads that arrive in different messages are looked at together, in the event loop.

A look costs by the call more than by the row, and more in a thread beside a busy loop than in it.
Large payloads have a thread each. What is done with a result is decided elsewhere
(`queues.broker.result_intake`).
"""

import asyncio
from collections.abc import Sequence

from queues import schema
from queues.errors import SchemaError
from queues.records import Payload, Summary

TOGETHER_BYTES = 2**20
"""Looked at before the loop goes on with other things, or the next arrival where that is larger."""
Results = list[Summary | SchemaError]
Arrival = tuple[Sequence[Payload], "asyncio.Future[Results]"]


class Arrivals:
    """Summarises payloads; belongs to one event loop."""

    def __init__(self) -> None:
        self._line: list[Arrival] = []

    async def summarize(self, payloads: Sequence[Payload]) -> Results:
        """See `schema.summarize_many`."""
        if max(map(len, payloads), default=0) > schema.SMALL_BYTES:
            return await asyncio.to_thread(schema.summarize_many, payloads)
        loop = asyncio.get_running_loop()
        looked: asyncio.Future[Results] = loop.create_future()
        self._line.append((payloads, looked))
        if len(self._line) == 1:
            loop.call_soon(self._look)
        return await looked

    def _look(self) -> None:
        """Answers those who came first, and comes back for the others."""
        together, size = 0, 0
        while together < len(self._line) and (not together or size < TOGETHER_BYTES):
            size += sum(map(len, self._line[together][0]))
            together += 1
        line, self._line = self._line[:together], self._line[together:]
        if self._line:
            asyncio.get_running_loop().call_soon(self._look)
        try:
            results = schema.summarize_many([each for payloads, _ in line for each in payloads])
        except Exception as error:  # noqa: BLE001  (each caller is told)
            for _, looked in line:
                if not looked.done():
                    looked.set_exception(error)
            return
        first = 0
        for payloads, looked in line:
            if not looked.done():
                looked.set_result(results[first : first + len(payloads)])
            first += len(payloads)

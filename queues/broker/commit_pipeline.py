"""From a decision of the book to the disk, and to everyone who waits for it.

    payload ─▶ journal's writer ─▶ durable ─▶ decision ─▶ ledger's writer ─▶ durable ─▶ the caller
                                                 │                                   is answered
        polls ◀──────────────────────────────────┘
        whoever may go on asks the book again, and its answer waits for the disk too

Nothing is decided about a payload that is not on disk, so small changes never wait for large ones.

The three kinds of waiting are `work` (leases), `progress` (batches, outcomes) and `line` (prompts).
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from queues.broker.long_polls import LongPolls
from queues.errors import LedgerError, QueueClosed
from queues.records import Payload
from queues.state.broker_state import UNREACHABLE, BrokerState
from queues.storage.group_commit import Writer
from queues.storage.journal import Journal, Location
from queues.storage.ledger import Ledger

T = TypeVar("T")
log = logging.getLogger(__name__)


class Commits:
    """Makes what a book decided durable; owns ledger and journal from its construction on.

    Args:
        book: Decides.
        ledger: Records.
        journal: Keeps payloads.
        interval: Seconds that a commit waits for other changes to join it.
    """

    def __init__(
        self, book: BrokerState, ledger: Ledger, journal: Journal, *, interval: float
    ) -> None:
        self._book = book
        self._ledger = ledger
        self._journal = journal
        self._rows = Writer(ledger, name="ledger-writer", interval=interval)
        self._payloads = Writer(journal, name="journal-writer", interval=interval)
        self._closed = False
        self._failure: LedgerError | None = None
        self.work = LongPolls(self.check_open)
        self.progress = LongPolls(self.check_open)
        self.line = LongPolls(self.check_open)

    @property
    def paused(self) -> str | None:
        """Why nothing is made durable for now; None while all is well."""
        return self._rows.paused or self._payloads.paused

    @property
    def paused_until(self) -> float:
        """Monotonic seconds until which nothing was made durable; minus infinity at first."""
        until = max(self._rows.paused_until, self._payloads.paused_until)
        return time.monotonic() if self.paused else until

    def check_open(self) -> None:
        """Raise once no call may be answered any more.

        Raises:
            QueueClosed: The broker is closed.
            LedgerError: A commit failed, or `fail` was called.
        """
        failure = self._failure or self._rows.failure or self._payloads.failure
        if failure is not None:
            raise failure
        if self._closed:
            raise QueueClosed("the broker is closed")

    def submit(self, change: Callable[[], T]) -> "asyncio.Future[T]":
        """Run `change` in the ledger's thread; the future has its result once it is durable."""
        return self._rows.submit(change)

    def keep(self, payloads: Sequence[Payload]) -> "asyncio.Future[list[Location]]":
        """Append payloads to the journal; the future says where, once they are durable."""
        return self._payloads.submit(lambda: [self._journal.append(each) for each in payloads])

    async def durable(self, change: Callable[[], T], *wakes: LongPolls) -> T:
        """Submit a change that the book has made, wake who waits for it, and wait for the disk.

        What can never be evaluated after it is settled in the same transaction.
        """
        settled = self._book.settle()
        error = f"training ended at version {self._book.version}"
        for name in {group.evaluation for group in settled}:
            log.warning("evaluation %s: %s: %s", name, UNREACHABLE, error)

        def record() -> T:
            result = change()
            for group in settled:
                self._ledger.fail(group.group_id, UNREACHABLE, error)
            return result

        durable = self._rows.submit(record)
        for polls in wakes:
            await polls.wake()
        return await durable

    async def fail(self, failure: LedgerError) -> None:
        """Answer everyone with this error from now on."""
        self._failure = failure
        await self._wake_all()

    async def close(self) -> None:
        """End every long poll with QueueClosed, and the writing of the ledger."""
        self._closed = True
        await self._wake_all()
        await self._payloads.close()
        await self._rows.close()

    async def _wake_all(self) -> None:
        for polls in (self.work, self.progress, self.line):
            await polls.wake()

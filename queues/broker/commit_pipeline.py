"""Commit pipeline: makes the broker's decisions durable before any caller is answered.

    payload ─▶ journal ─▶ durable ─▶ decision ─▶ ledger ─▶ durable ─▶ the caller is answered
                                        └─▶ long polls, whose own answers wait for the disk too

Nothing is decided about a payload that is not on disk, so small changes never wait for large ones.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from queues.broker.long_polls import LongPolls
from queues.errors import LedgerError, QueueClosed
from queues.records import Payload
from queues.state.broker_state import BrokerState
from queues.state.groups import UNREACHABLE
from queues.storage.group_commit import GroupCommit
from queues.storage.journal import Journal, Location
from queues.storage.ledger import Ledger

T = TypeVar("T")
log = logging.getLogger(__name__)


class CommitPipeline:
    """Makes decisions durable; owns ledger and journal from its construction on.

    The state is changed in the event loop only, ledger and journal in the threads of their writers.
    """

    def __init__(
        self, state: BrokerState, ledger: Ledger, journal: Journal, *, probe_seconds: float
    ) -> None:
        self.state = state
        self.ledger = ledger
        self.journal = journal
        times = {"interval": state.config.commit_interval_seconds, "probe_seconds": probe_seconds}
        self._ledger_writer = GroupCommit(ledger, **times)
        self._journal_writer = GroupCommit(journal, **times)
        # The ledger's writer waits for the backup, which therefore comes first.
        self._pauses = [ledger.backup.pause] if ledger.backup is not None else []
        self._pauses += [self._ledger_writer.pause, self._journal_writer.pause]
        self._closed = False
        self._failure: LedgerError | None = None
        self.lease_polls = LongPolls(self.check_open)
        """Callers that wait for groups to generate."""
        self.progress_polls = LongPolls(self.check_open)
        """Callers that wait for a batch or the outcome of an evaluation."""
        self.prompt_polls = LongPolls(self.check_open)
        """Callers that wait until prompts are wanted."""
        self.all_polls = (self.lease_polls, self.progress_polls, self.prompt_polls)

    @property
    def paused(self) -> str | None:
        """Reason why nothing is made durable for now; None normally."""
        return next((pause.reason for pause in self._pauses if pause.reason is not None), None)

    @property
    def paused_until(self) -> float:
        """End of the last pause in monotonic seconds; minus infinity before the first pause."""
        until = max(pause.until for pause in self._pauses)
        return time.monotonic() if self.paused else until

    def check_open(self) -> None:
        """Raise QueueClosed once closed, LedgerError once a commit failed or `fail` was called."""
        failure = self._failure or self._ledger_writer.failure or self._journal_writer.failure
        if failure is not None:
            raise failure
        if self._closed:
            raise QueueClosed("the broker is closed")

    def submit(self, change: Callable[[], T]) -> "asyncio.Future[T]":
        """Run `change` in the ledger's thread; the future has its result once it is durable."""
        return self._ledger_writer.submit(change)

    def keep(self, payloads: Sequence[Payload]) -> "asyncio.Future[list[Location]]":
        """Append payloads to the journal; the future has their locations once they are durable."""
        return self._journal_writer.submit(lambda: [self.journal.append(x) for x in payloads])

    async def durable(self, change: Callable[[], T], *wakes: LongPolls) -> T:
        """Submit a change that the state has made, wake long polls, and wait for the disk.

        Evaluations that can never be scored after the change fail in the same transaction.
        """
        unreachable = self.state.fail_unreachable()
        error = f"training ended at version {self.state.version}"
        for name in {group.evaluation for group in unreachable}:
            log.warning("evaluation %s: %s: %s", name, UNREACHABLE, error)

        def record() -> T:
            result = change()
            for group in unreachable:
                self.ledger.fail(group.group_id, UNREACHABLE, error)
            return result

        durable = self.submit(record)
        for polls in wakes:
            polls.wake()
        return await durable

    def fail(self, failure: LedgerError) -> None:
        """Answer every call with this error from now on."""
        self._failure = failure
        self._wake_all()

    async def close(self) -> None:
        """End every long poll with QueueClosed, then commit what was submitted and close."""
        self._closed = True
        self._wake_all()
        if self.ledger.backup is not None:
            self.ledger.backup.closing.set()
        await self._journal_writer.close()
        await self._ledger_writer.close()

    def _wake_all(self) -> None:
        for polls in self.all_polls:
            polls.wake()

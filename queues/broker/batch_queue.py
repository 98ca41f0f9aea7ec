"""The learner's end of the broker: batches go out, acknowledgements and checkpoints come in."""

import asyncio
import json
import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from queues.broker.commit_pipeline import Commits
from queues.errors import AccountingError, InputError
from queues.readers.accounting import account
from queues.records import Batch, BatchRecord
from queues.state.broker_state import BrokerState
from queues.storage.journal import Journal, Location, read_group
from queues.storage.ledger import Ledger

log = logging.getLogger(__name__)
CHECKSUM = "weights_checksum"
"""Of the statistics of a batch: of the weights that it gave."""


class Batches:
    """What `queues.protocols.BatchQueue` asks for.

    Args:
        book: Decides.
        ledger: Records.
        commits: Makes it durable.
        journal: Where the groups lie.
        patience_seconds: How long engines that lag get no training groups after a batch.
    """

    def __init__(
        self,
        book: BrokerState,
        ledger: Ledger,
        commits: Commits,
        journal: Journal,
        *,
        patience_seconds: float,
    ) -> None:
        self._book = book
        self._ledger = ledger
        self._commits = commits
        self._journal = journal
        self._patience_seconds = patience_seconds

    async def take(self, version: int, timeout: float) -> Batch | None:
        """The batch to train at `version`; long-polls, None at the timeout.

        It is recorded before it is returned: asked again, after a restart too, it is the same.

        Raises:
            QueueClosed: That batch will never come.
            ProtocolError: It is not the turn of that batch.
        """

        def decide() -> asyncio.Future[list[Location]] | None:
            if 0 <= version < self._book.version + bool(self._book.taken):
                return self._commits.submit(partial(self._ledger.locations, version))
            group_ids = self._book.take(version)
            if group_ids is None:
                return None
            reissues = self._book.pass_over()
            if reissues:
                log.info(
                    "batch %d: %d groups are overdue and dropped: %s", version, len(reissues),
                    ", ".join(dropped.group_id for dropped, _ in reissues),
                )  # fmt: skip

            def record() -> list[Location]:
                self._ledger.reissue(reissues, version)
                return self._ledger.take(version, group_ids)

            return self._commits.submit(record)

        recorded = await self._commits.progress.until(decide, timeout)
        if recorded is None:
            return None
        if self._book.bounds.on_overdue != "wait":  # what is overdue takes no place, or not this
            await self._commits.work.wake()
            await self._commits.line.wake()
        payloads = await asyncio.to_thread(self._read, await recorded)
        return Batch(version=version, payloads=payloads)

    async def ack(self, version: int, statistics: Mapping[str, Any]) -> None:
        """The batch of `version` is trained: the learner is at version + 1.

        Repeated, it changes nothing; weights that came out otherwise than the first time, as they
        may where kernels are not deterministic, are counted.

        Args:
            version: Of the batch.
            statistics: Anything that JSON can hold; kept in the ledger, together with how much
                was left out of training or trained late so far, where something may be, and with
                the controller's state after this batch, where there is one; it goes by `ess`.

        Raises:
            ProtocolError: That batch is not taken.
            AccountingError: The groups do not add up any more.
        """
        self._commits.check_open()
        if version < self._book.version:
            await self._compare(version, statistics)
            return
        try:
            text = json.dumps({**statistics, **self._book.additions(statistics)})
        except (TypeError, ValueError) as error:
            raise InputError(f"statistics of batch {version} are not JSON: {error}") from error
        record = BatchRecord(version=version, acked_at=time.time(), statistics=json.loads(text))
        self._book.ack(record)
        self._book.patience_ends = time.monotonic() + self._patience_seconds
        self._commits.work.wake_after(self._patience_seconds)
        memory = dict(self._book.groups.counts)
        counts = await self._commits.durable(
            partial(self._ledger.ack, version, text),
            self._commits.work,
            self._commits.progress,
            self._commits.line,
        )
        if not account(counts, memory).balanced:
            raise AccountingError(
                f"after batch {version} the groups do not add up: in the ledger {counts},"
                f" in memory {memory}"
            )

    async def commit_checkpoint(self, version: int, path: str) -> None:
        """A checkpoint of `version` is complete on disk at `path`.

        Args:
            version: Batches trained in it.
            path: Its folder, relative to the run's, so that a run that is moved or copied keeps its
                checkpoints. An absolute path is kept as it is.
        """
        self._commits.check_open()
        await self._commits.durable(partial(self._ledger.commit_checkpoint, version, path))

    async def _compare(self, version: int, statistics: Mapping[str, Any]) -> None:
        """Hold a batch that was trained again against what was recorded of it."""
        recorded = json.loads(await self._commits.submit(partial(self._ledger.statistics, version)))
        before, now = recorded.get(CHECKSUM), statistics.get(CHECKSUM)
        if before != now:
            self._book.diverged += 1
            log.warning(
                "batch %d, trained again, gave other weights than before: checksum %s, was %s;"
                " from here on the run is another one than that which was rolled back",
                version, now, before,
            )  # fmt: skip

    def _read(self, locations: Sequence[Location]) -> list[bytes]:
        return [
            read_group(self._journal.directory, place.segment, place.offset) for place in locations
        ]

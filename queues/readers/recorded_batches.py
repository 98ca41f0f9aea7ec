"""The batches that a run has trained, read again from its ledger and journal."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.errors import InputError
from queues.errors import JournalError, QueueClosed
from queues.protocols import BatchQueue
from queues.readers.open_run import open_ledger
from queues.records import Batch
from queues.storage.journal import LOCATION, read_group
from queues.storage.ledger_schema import IS_REMOVED, JOURNAL_NAME


class RecordedBatches(BatchQueue):
    """A queue in which every recorded batch of a run is ready: a learner trains it again.

    Acknowledgements are kept in memory only.
    """

    def __init__(self, run_directory: Path) -> None:
        self._directory = run_directory
        self._acknowledged: list[dict[str, Any]] = []

    async def take(self, version: int, timeout: float) -> Batch:
        """Return the batch that was trained at a version; QueueClosed if none is recorded."""
        payloads = await asyncio.to_thread(read_batch, self._directory, version)
        if not payloads:
            raise QueueClosed(f"take: no batch {version} is recorded")
        return Batch(version=version, payloads=payloads)

    async def ack(self, version: int, statistics: Mapping[str, Any]) -> bool:
        """Keep the statistics in memory; return True, since every batch counts as new."""
        self._acknowledged.append({**statistics, "version": version})
        return True

    async def commit_checkpoint(self, version: int, path: str) -> None:
        """Record nothing."""

    async def cursor(self) -> str | None:
        """Return None, since no prompt is issued."""
        return None

    async def paused(self) -> str:
        """Return the reason why a `take` is answered late: `BrokerClient` waits for it."""
        return "the batch is read from the journal"

    async def acknowledged(self, after: int = -1) -> list[dict[str, Any]]:
        """Return statistics and `version` of the acknowledged batches later than `after`."""
        return [x for x in self._acknowledged if x["version"] > after]


def read_batch(run_directory: Path, version: int, *, groups: int = -1) -> list[bytes]:
    """Return the payloads of a recorded batch, in its order; empty if it is not recorded.

    With `groups`, only the first so many are read. A group that was removed from the journal or is
    damaged raises InputError.
    """
    with open_ledger(run_directory, verify=False) as database:
        rows = database.execute(
            f"SELECT group_id, {IS_REMOVED}, {LOCATION} FROM batch_groups"
            " JOIN results USING (group_id) WHERE version = ? ORDER BY position LIMIT ?",
            (version, groups),
        ).fetchall()
    return [
        read_payload(run_directory, f"batch {version}: its group {group_id}", *stored)
        for group_id, *stored in rows
    ]


def read_payload(run_directory: Path, name: str, is_removed: bool, *location: int) -> bytes:
    """Return the payload of a group; InputError, which begins with its name, if it is gone."""
    if is_removed:
        raise InputError(
            f"{name} was removed from the journal when nothing needed it any more; "
            'queues.keep_rollouts = "all" keeps every group'
        )
    try:
        return read_group(run_directory / JOURNAL_NAME, location)
    except JournalError as error:
        raise InputError(f"{name} cannot be read any more: {error}") from error

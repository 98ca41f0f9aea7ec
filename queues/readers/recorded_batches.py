"""The batches that a run has trained, handed out again from its ledger and journal, read-only.

A queue of batches like the broker's (`queues.protocols.BatchQueue`) with everything ready at once:
a learner that takes from it trains again what it trained before. Leaves out weights, and what is
compared with what.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from queues.errors import InputError, JournalError, QueueClosed
from queues.readers.accounting import open_ledger, removed_segments
from queues.records import Batch
from queues.storage.journal import read_group
from queues.storage.ledger_schema import JOURNAL_NAME


class RecordedBatches:
    """Answers a learner from a run's folder, and keeps what it acknowledges in memory alone.

    Args:
        run_directory: Of a run that nobody works on.
    """

    def __init__(self, run_directory: Path) -> None:
        self._directory = run_directory
        self._acknowledged: list[dict[str, Any]] = []

    async def take(self, version: int, timeout: float) -> Batch:
        """The batch that was trained at a version.

        Raises:
            QueueClosed: No such batch is recorded.
            InputError: It is, but a group of it cannot be read any more.
        """
        payloads = read_batch(self._directory, version)
        if not payloads:
            raise QueueClosed(f"take: no batch {version} is recorded")
        return Batch(version=version, payloads=payloads)

    async def ack(self, version: int, statistics: Mapping[str, Any]) -> None:
        """Keeps the statistics."""
        self._acknowledged.append({**statistics, "version": version})

    async def commit_checkpoint(self, version: int, path: str) -> None:
        """Records nothing."""

    async def cursor(self) -> str | None:
        """None: no prompt is issued."""
        return None

    async def acknowledged(self, after: int = -1) -> list[dict[str, Any]]:
        """Statistics and `version` of the batches that were acknowledged later than `after`."""
        return [row for row in self._acknowledged if row["version"] > after]


def read_batch(run_directory: Path, version: int) -> list[bytes]:
    """The groups of a recorded batch in its order, as they were put; empty where there is none.

    The rows of the ledger are not compared with their checksums: `queues.readers.accounting` does
    that.

    Raises:
        InputError: A group of it is not in the journal any more, or damaged.
        LedgerError: The ledger cannot be read.
    """
    with open_ledger(run_directory, verify=False) as database:
        gone = removed_segments(database)
        places = database.execute(
            "SELECT group_id, segment, offset FROM batch_groups JOIN results USING (group_id)"
            " WHERE version = ? ORDER BY position",
            (version,),
        ).fetchall()
    payloads = []
    for group_id, segment, offset in places:
        if segment in gone:
            raise InputError(
                f"batch {version}: its group {group_id} was removed from the journal when nothing "
                'needed it any more; queues.keep_rollouts = "all" keeps every group'
            )
        try:
            payloads.append(read_group(run_directory / JOURNAL_NAME, segment, offset))
        except JournalError as error:
            raise InputError(
                f"batch {version}: its group {group_id} cannot be read any more: {error}"
            ) from error
    return payloads


def committed_checkpoints(run_directory: Path) -> dict[int, Path]:
    """Folders of the committed checkpoints that are still there, by version, ascending.

    Raises:
        InputError: There is no run in the directory.
        LedgerError: Its ledger cannot be read.
    """
    with open_ledger(run_directory) as database:
        rows = database.execute("SELECT version, path FROM checkpoints ORDER BY version").fetchall()
    folders = {version: run_directory / path for version, path in rows}
    return {version: folder for version, folder in folders.items() if folder.is_dir()}

"""Which journal segments may go, so that a run of weeks does not fill its disk.

A segment is needed as long as one of its groups is not in a final state, or was trained at or after
the oldest checkpoint that is still there: a rollback trains those batches again. One without any
group, as a crash leaves it, is not needed.

    put begins ─▶ frame in the journal ─▶ row in the ledger ─▶ put ends
        └── from here on the segment that is the newest, and all later ones, stay ──┘

For until its row is committed, nothing in the ledger tells that a frame is needed. The newest
segment on disk always stays. What was removed is remembered in the ledger (`meta`), so that a
reader can tell it from what was lost; the rows of its groups stay.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from queues.broker.commit_pipeline import Commits
from queues.readers.accounting import oldest_checkpoint, open_ledger
from queues.storage.journal import Journal, remove_segment, segments
from queues.storage.ledger import Ledger
from queues.storage.ledger_schema import JOURNAL_NAME, REMOVED_SEGMENT

log = logging.getLogger(__name__)


class Retention:
    """Removes segments that nothing can need any more.

    Args:
        directory: The run's folder.
        ledger: Remembers what was removed.
        commits: Makes that durable before anything is.
        journal: Says which segment is the newest.
    """

    def __init__(self, directory: Path, ledger: Ledger, commits: Commits, journal: Journal) -> None:
        self._directory = directory
        self._ledger = ledger
        self._commits = commits
        self._journal = journal
        self._puts: Counter[int] = Counter()
        """Puts on their way, by the segment that was the newest when they began."""

    @contextmanager
    def put(self) -> Iterator[None]:
        """Around a put, from before its first frame until its rows are submitted, or never are."""
        segment = self._journal.newest
        self._puts[segment] += 1
        try:
            yield
        finally:
            self._puts -= Counter((segment,))

    async def apply(self) -> None:
        """Remove what may go; to be called after a checkpoint is committed."""
        below = min(self._puts, default=self._journal.newest)
        # Rows of puts that have ended, cancelled ones too, were submitted before: wait for them.
        await self._commits.submit(lambda: None)
        gone = await asyncio.to_thread(removable, self._directory, below)
        if not gone:
            return

        def record() -> None:
            for segment in gone:
                self._ledger.remember(f"{REMOVED_SEGMENT}{segment}", f"{time.time():.0f}")

        await self._commits.durable(record)
        for segment in gone:
            await asyncio.to_thread(remove_segment, self._directory / JOURNAL_NAME, segment)
        log.info("removed %d journal segments that nothing needs any more", len(gone))


def removable(run_directory: Path, below: int) -> list[int]:
    """Segments on disk that may go, ascending; none before there is a checkpoint to go back to.

    Args:
        run_directory: Holds ledger and journal.
        below: The oldest segment that may hold frames whose rows are not committed yet.

    Raises:
        LedgerError: The ledger cannot be read.
    """
    there = [x for x in segments(run_directory / JOURNAL_NAME)[:-1] if x < below]
    oldest = oldest_checkpoint(run_directory)
    if not there or oldest is None:
        return []
    with open_ledger(run_directory, verify=False) as database:
        # Whatever table says where something of a group lies.
        tables = database.execute(
            "SELECT tables.name FROM sqlite_schema AS tables, pragma_table_info(tables.name) AS it"
            " WHERE tables.type = 'table' AND it.name = 'segment'"
        ).fetchall()
        needed: set[int] = set()
        for (table,) in tables:
            rows = database.execute(
                f"SELECT DISTINCT segment FROM {table} JOIN groups USING (group_id)"
                " WHERE segment IS NOT NULL AND state NOT IN ('dropped', 'failed', 'scored')"
                " AND (state != 'trained' OR trained_version >= ?)",
                (oldest,),
            )
            needed.update(segment for (segment,) in rows)
    return [segment for segment in there if segment not in needed]

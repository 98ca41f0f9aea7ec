"""Which journal segments may go, so that a run of weeks does not fill its disk.

A segment is needed as long as one of its groups is not in a final state, or was trained at or after
the oldest checkpoint that is still there: a rollback trains those batches again. The newest segment
always stays. What was removed is remembered in the ledger (`meta`), so that a reader can tell it
from what was lost; the rows of its groups stay.
"""

import asyncio
import logging
import time
from pathlib import Path

from queues.accounts import oldest_checkpoint, open_ledger, removed_segments
from queues.commits import Commits
from queues.journal import remove_segment, segments
from queues.ledger import Ledger
from queues.ledger_tables import JOURNAL_NAME, REMOVED_SEGMENT

log = logging.getLogger(__name__)


class Retention:
    """Removes segments that nothing can need any more.

    Args:
        directory: The run's folder.
        ledger: Remembers what was removed.
        commits: Makes that durable before anything is.
    """

    def __init__(self, directory: Path, ledger: Ledger, commits: Commits) -> None:
        self._directory = directory
        self._ledger = ledger
        self._commits = commits

    async def apply(self) -> None:
        """Remove what may go; to be called after a checkpoint is committed."""
        gone = await asyncio.to_thread(removable, self._directory)
        if not gone:
            return

        def record() -> None:
            for segment in gone:
                self._ledger.remember(f"{REMOVED_SEGMENT}{segment}", f"{time.time():.0f}")

        await self._commits.durable(record)
        for segment in gone:
            await asyncio.to_thread(remove_segment, self._directory / JOURNAL_NAME, segment)
        log.info("removed %d journal segments that nothing needs any more", len(gone))


def removable(run_directory: Path) -> list[int]:
    """Segments on disk that may go, ascending; none before there is a checkpoint to go back to.

    Raises:
        LedgerError: The ledger cannot be read.
    """
    there = segments(run_directory / JOURNAL_NAME)[:-1]
    oldest = oldest_checkpoint(run_directory)
    if not there or oldest is None:
        return []
    with open_ledger(run_directory, verify=False) as database:
        # Whatever table says where something of a group lies.
        tables = database.execute(
            "SELECT tables.name FROM sqlite_schema AS tables, pragma_table_info(tables.name) AS it"
            " WHERE tables.type = 'table' AND it.name = 'segment'"
        ).fetchall()
        known, needed = removed_segments(database), set()
        for (table,) in tables:
            rows = database.execute(
                "SELECT segment, max(state NOT IN ('dropped', 'failed', 'scored')"
                f" AND (state != 'trained' OR trained_version >= ?)) FROM {table}"
                " JOIN groups USING (group_id) WHERE segment IS NOT NULL GROUP BY segment",
                (oldest,),
            )
            for segment, is_needed in rows:
                known.add(segment)
                if is_needed:
                    needed.add(segment)
    return [segment for segment in there if segment in known - needed]

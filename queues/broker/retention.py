"""Removal of journal segments that nothing needs, so that a run of weeks does not fill its disk.

A segment is needed as long as one of its groups is not in a final state, or was trained at or after
the oldest checkpoint that still exists: a rollback trains those batches again.

    put begins ─▶ frame in the journal ─▶ row in the ledger ─▶ put ends
        └── the segment that is the newest at this moment, and all later ones, stay ──┘

The ledger records removed segments (`meta`), which a reader can thus distinguish from lost ones.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headway import clock
from queues.broker.commit_pipeline import CommitPipeline
from queues.readers.checkpoints import committed_checkpoints
from queues.readers.open_run import open_ledger
from queues.storage.journal import remove_segment, segments
from queues.storage.ledger_schema import JOURNAL_NAME, REMOVED_SEGMENT

log = logging.getLogger(__name__)


class Retention:
    """Removes segments of a run's journal that nothing can need, unless all are to be kept."""

    def __init__(self, directory: Path, commits: CommitPipeline) -> None:
        self._directory = directory
        self._commits = commits
        self._puts: Counter[int] = Counter()
        """Number of puts in progress by the segment that was the newest when they began."""

    @contextmanager
    def put(self) -> Iterator[None]:
        """Protect the segments of a put, from its first frame until its rows are submitted."""
        segment = self._commits.journal.newest
        self._puts[segment] += 1
        try:
            yield
        finally:
            self._puts -= Counter((segment,))

    async def apply(self) -> None:
        """Remove unneeded segments; call this after a checkpoint is committed."""
        if self._commits.state.config.keep_rollouts == "all":
            return
        below = min(self._puts, default=self._commits.journal.newest)
        # Rows of puts that have ended, cancelled ones too, were submitted before: wait for them.
        await self._commits.submit(lambda: None)
        unneeded = await asyncio.to_thread(removable, self._directory, below)
        if not unneeded:
            return

        def record() -> None:
            for segment in unneeded:
                key = f"{REMOVED_SEGMENT}{segment}"
                self._commits.ledger.remember(key, f"{clock.now():.0f}")

        await self._commits.durable(record)
        for segment in unneeded:
            await asyncio.to_thread(remove_segment, self._directory / JOURNAL_NAME, segment)
        log.info("removed %d journal segments that nothing needs any more", len(unneeded))


def removable(run_directory: Path, below: int) -> list[int]:
    """Return the segments on disk that nothing needs, ascending; none before a first checkpoint.

    Segments from `below` on may hold frames whose rows are not committed yet.
    """
    existing = [x for x in segments(run_directory / JOURNAL_NAME)[:-1] if x < below]
    oldest = min(committed_checkpoints(run_directory, verify=False), default=None)
    if not existing or oldest is None:
        return []
    with open_ledger(run_directory, verify=False) as database:
        rows = database.execute(
            "SELECT DISTINCT segment FROM results JOIN groups USING (group_id)"
            " WHERE segment IS NOT NULL AND state NOT IN ('dropped', 'failed', 'scored')"
            " AND (state != 'trained' OR trained_version >= ?)",
            (oldest,),
        )
        return sorted(set(existing) - {segment for (segment,) in rows})

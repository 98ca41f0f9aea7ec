"""Times at which the groups of a run were generated, accepted, taken and trained.

Held-out evaluations are not journaled, so they are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from queues.readers.open_run import open_ledger
from queues.records import Purpose
from queues.storage.journal import LOCATION, read_group
from queues.storage.ledger_schema import JOURNAL_NAME


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTimes:
    """One accepted train group; all times are epoch seconds."""

    engine_id: str
    accepted_at: float
    taken_at: float | None
    """None if no batch has it; of a filtered group the time of its acceptance."""
    rollouts: Sequence[tuple[float, float]]
    """Begin and end of each rollout."""
    tokens: Sequence[int] = ()
    """Sampled tokens of each rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Some batches of a run and the groups that were live meanwhile; epoch seconds."""

    groups: Sequence[GroupTimes]
    acked_at: dict[int, float]
    """Time of acknowledgement by version of the batch."""
    checkpoints: dict[int, float]
    """Time of commit by version of the checkpoint."""


def last_lease(run_directory: Path) -> float | None:
    """Return when a train group was leased for the last time, in epoch seconds; None if never."""
    with open_ledger(run_directory, verify=False) as database:
        newest = "SELECT max(leased_at) FROM groups WHERE purpose = ?"
        leased_at: float | None = database.execute(newest, (Purpose.TRAIN,)).fetchone()[0]
    return leased_at


def read_history(run_directory: Path, first: int, last: int) -> History:
    """Read the groups that were live while some batches were waited for and trained.

    For every group generated while version `last` was trained, pass `last` + η + 1: by then each of
    them is in a batch. A group that cannot be read back raises JournalError.
    """
    from queues.schema import decode

    journal = run_directory / JOURNAL_NAME
    versions = {"first": first, "last": last}
    with open_ledger(run_directory) as database:
        rows = database.execute(
            f"SELECT {LOCATION}, accepted_at,"
            " iif(state = 'dropped', accepted_at, taken_at) AS left_at"
            " FROM results JOIN groups USING (group_id)"
            " LEFT JOIN batch_groups USING (group_id) LEFT JOIN batches USING (version)"
            " WHERE segment IS NOT NULL AND CASE"
            "   WHEN version IS NOT NULL THEN version BETWEEN :first AND :last"
            "   WHEN state = 'dropped' THEN accepted_at >"
            "     (SELECT coalesce(max(acked_at), 0) FROM batches WHERE version < :first)"
            "   ELSE TRUE END"
            " ORDER BY accepted_at",
            versions,
        ).fetchall()
        acked = database.execute(
            "SELECT version, acked_at FROM batches"
            " WHERE acked_at IS NOT NULL AND version BETWEEN :first AND :last",
            versions,
        ).fetchall()
        checkpoints = database.execute("SELECT version, at FROM checkpoints").fetchall()
    groups = []
    for *location, accepted_at, taken_at in rows:
        rollouts = decode(read_group(journal, location)).rollouts
        groups.append(
            GroupTimes(
                engine_id=rollouts[0].engine_id,
                accepted_at=accepted_at,
                taken_at=taken_at,
                rollouts=[(r.created_at.timestamp(), r.finished_at.timestamp()) for r in rollouts],
                tokens=[sum(r.loss_mask) for r in rollouts],
            )
        )
    return History(groups=groups, acked_at=dict(acked), checkpoints=dict(checkpoints))

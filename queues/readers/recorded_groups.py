"""The groups of a run whose rollouts are in its journal, read one at a time."""

from pathlib import Path
from typing import NamedTuple

from queues.readers.open_run import open_ledger
from queues.readers.recorded_batches import read_payload
from queues.records import RolloutGroup
from queues.storage.journal import LOCATION
from queues.storage.ledger_schema import IS_REMOVED


class RecordedGroup(NamedTuple):
    """An accepted group, and what became of it."""

    group: RolloutGroup
    state: str
    """One of `queues.state.groups.State`."""
    reason: str
    """Reason for which it was dropped; else empty."""
    trained_version: int | None
    """Version whose batch trained it; None: no batch has."""


def recorded_groups(run_directory: Path) -> list[str]:
    """Return the ids of the groups that were journaled, in the order of issue."""
    with open_ledger(run_directory, verify=False) as database:
        rows = database.execute(
            "SELECT group_id FROM results JOIN groups USING (group_id)"
            " WHERE segment IS NOT NULL ORDER BY number"
        )
        return [group_id for (group_id,) in rows]


def read_recorded_group(run_directory: Path, group_id: str) -> RecordedGroup:
    """Return one of `recorded_groups`; InputError if it was removed since or is damaged."""
    from queues.schema import decode

    with open_ledger(run_directory, verify=False) as database:
        state, reason, version, *stored = database.execute(
            f"SELECT state, reason, trained_version, {IS_REMOVED}, {LOCATION} FROM results"
            " JOIN groups USING (group_id) WHERE group_id = ?",
            (group_id,),
        ).fetchone()
    payload = read_payload(run_directory, f"group {group_id}", *stored)
    return RecordedGroup(decode(payload), state, reason, version)

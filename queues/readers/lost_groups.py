"""Groups whose rollouts are needed and cannot be read from the journal any more."""

from pathlib import Path
from typing import NamedTuple

from queues.errors import JournalError
from queues.readers.open_run import open_ledger
from queues.storage.journal import LOCATION, Location, read_group
from queues.storage.ledger_schema import JOURNAL_NAME


class LostGroup(NamedTuple):
    """A group whose frame in the journal is missing or damaged."""

    group_id: str
    version: int | None
    """The batch that it is part of; None if it waits to be trained."""
    error: str
    """Names the file."""


def lost_groups(run_directory: Path, *, since: int) -> list[LostGroup]:
    """Return the lost groups among those of batches `since` and later, and those not yet trained.

    Every frame of these groups is read and compared with its checksum.
    """
    with open_ledger(run_directory, verify=False) as database:
        rows = database.execute(
            f"SELECT group_id, version, {LOCATION} FROM results JOIN groups USING (group_id)"
            " LEFT JOIN batch_groups USING (group_id) WHERE segment IS NOT NULL AND"
            " (state IN ('ready', 'taken') OR (state = 'trained' AND version >= ?))"
            " ORDER BY segment, offset",
            (since,),
        ).fetchall()
    lost = []
    for group_id, version, *location in rows:
        try:
            read_group(run_directory / JOURNAL_NAME, Location(*location))
        except JournalError as error:
            lost.append(LostGroup(group_id, version, str(error)))
    return lost

"""The committed checkpoints of a run, and the groups that are needed from there on and lost."""

from pathlib import Path
from typing import NamedTuple

from queues.errors import JournalError
from queues.readers.open_run import open_ledger
from queues.storage.journal import LOCATION, read_group
from queues.storage.ledger_schema import JOURNAL_NAME

LONGEST_SAVE_SECONDS = 1800.0


class Checkpoint(NamedTuple):
    """A checkpoint that was committed; its folder may have been removed since."""

    version: int
    folder: Path
    weights_checksum: str | None
    """Checksum of its weights as the batch before it recorded it; None if it recorded none."""


class Progress(NamedTuple):
    """The progress of a run, as its ledger has it."""

    trained: int
    """Number of batches."""
    checkpoints: list[Checkpoint]
    """Every checkpoint that was committed, in the order of the versions."""


def read_progress(run_directory: Path, *, verify: bool = True) -> Progress:
    """Return the number of trained batches of a run, and its checkpoints."""
    with open_ledger(run_directory, verify=verify) as database:
        rows = database.execute(
            "SELECT checkpoints.version, path, json_extract(statistics, '$.weights_checksum')"
            " FROM checkpoints LEFT JOIN batches ON batches.version = checkpoints.version - 1"
            " ORDER BY checkpoints.version"
        ).fetchall()
        (trained,) = database.execute(
            "SELECT count(*) FROM batches WHERE acked_at IS NOT NULL"
        ).fetchone()
    saved = [Checkpoint(version, run_directory / path, known) for version, path, known in rows]
    return Progress(trained, saved)


def committed_checkpoints(run_directory: Path, *, verify: bool = True) -> dict[int, Path]:
    """Return the existing folders of a run's committed checkpoints, by version, ascending."""
    recorded = read_progress(run_directory, verify=verify).checkpoints
    return {version: folder for version, folder, _ in recorded if folder.is_dir()}


def newest_checkpoint(run_directory: Path, *, verify: bool = True) -> tuple[int, Path] | None:
    """Return version and folder of the newest of `committed_checkpoints`; None without any."""
    return max(committed_checkpoints(run_directory, verify=verify).items(), default=None)


def last_save_seconds(run_directory: Path) -> float:
    """Return how long the newest checkpoint of a run took to save, 0 without any.

    It is the time from the acknowledgement of the batch before it to its commit, but at most
    LONGEST_SAVE_SECONDS: a batch that was trained again was acknowledged long before.
    """
    with open_ledger(run_directory, verify=False) as database:
        row = database.execute(
            "SELECT at - acked_at FROM checkpoints"
            " JOIN batches ON batches.version = checkpoints.version - 1"
            " ORDER BY checkpoints.version DESC LIMIT 1"
        ).fetchone()
    return min(max(0.0, row[0] or 0.0), LONGEST_SAVE_SECONDS) if row else 0.0


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
            read_group(run_directory / JOURNAL_NAME, location)
        except JournalError as error:
            lost.append(LostGroup(group_id, version, str(error)))
    return lost

"""The committed checkpoints of a run."""

from pathlib import Path
from typing import NamedTuple

from queues.readers.open_run import open_ledger

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

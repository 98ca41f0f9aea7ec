"""The committed checkpoints of a run."""

from pathlib import Path

from queues.readers.open_run import open_ledger


def committed_checkpoints(run_directory: Path, *, verify: bool = True) -> dict[int, Path]:
    """Return the existing folders of a run's committed checkpoints, by version, ascending."""
    with open_ledger(run_directory, verify=verify) as database:
        rows = database.execute("SELECT version, path FROM checkpoints ORDER BY version").fetchall()
    folders = {version: run_directory / path for version, path in rows}
    return {version: folder for version, folder in folders.items() if folder.is_dir()}


def newest_checkpoint(run_directory: Path, *, verify: bool = True) -> tuple[int, Path] | None:
    """Return version and folder of the newest of `committed_checkpoints`; None without any."""
    return max(committed_checkpoints(run_directory, verify=verify).items(), default=None)

"""The journaled rollouts of a run as a Parquet file."""

from pathlib import Path

from headway.atomic_file import atomic_file
from headway.errors import InputError
from queues.readers.open_run import open_ledger
from queues.schema import write_parquet
from queues.storage.journal import LOCATION, read_group
from queues.storage.ledger_schema import IS_REMOVED, JOURNAL_NAME


def removed_groups(run_directory: Path) -> int:
    """Return the number of accepted groups whose rollouts `queues.broker.retention` removed."""
    with open_ledger(run_directory) as database:
        count = database.execute(f"SELECT count(*) FROM results WHERE {IS_REMOVED}")
        return int(count.fetchone()[0])


def export_parquet(run_directory: Path, file: Path) -> int:
    """Write every journaled rollout of a run to Parquet; return the number of rows.

    Columns are those of `queues.schema.SCHEMA`, `state` and `trained_version` (null: untrained).
    Removed rollouts are left out; `removed_groups` counts them. Raises InputError if the file
    exists or cannot be written, and JournalError if a group cannot be read back.
    """
    _check_absent(file)
    journal = run_directory / JOURNAL_NAME
    with open_ledger(run_directory) as database:
        rows = database.execute(
            f"SELECT state, trained_version, {LOCATION} FROM results JOIN groups USING (group_id)"
            f" WHERE segment IS NOT NULL AND NOT {IS_REMOVED} ORDER BY segment, offset"
        )
        groups = (
            (read_group(journal, location), state, trained_version)
            for state, trained_version, *location in rows
        )
        try:
            with atomic_file(file) as opened:
                _check_absent(file)  # another command may have written it
                return write_parquet(groups, opened)
        except OSError as error:
            raise InputError(f"{file}: cannot be written: {error}") from error


def _check_absent(file: Path) -> None:
    if file.exists():
        raise InputError(f"{file} exists; name a file that does not")

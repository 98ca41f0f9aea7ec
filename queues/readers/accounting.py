"""The accounts of a run: is every issued group in exactly one state?

Read from the ledger alone and without writing to it, so `headway inspect` works on a run that is
going on as well as on one whose processes are all dead.
"""

import fcntl
import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from queues.errors import InputError, LedgerError
from queues.records import Purpose
from queues.state.groups import State, StateCounts
from queues.storage.journal import read_group
from queues.storage.ledger_schema import (
    FILE_NAME,
    JOURNAL_NAME,
    LOCK_NAME,
    REMOVED_SEGMENT,
    check_schema_version,
)
from queues.storage.row_checksums import check
from queues.storage.state_counts import Counts, count_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounting:
    """Where the train groups of a run are.

    issued = queued + leased + ready + taken + trained + Σ dropped + Σ failed
    """

    issued: int
    """Counted as they were issued, not by adding up the states."""
    queued: int
    leased: int
    ready: int
    taken: int
    trained: int
    dropped: dict[str, int]
    """By reason."""
    failed: dict[str, int]
    """By reason."""
    trained_twice: int
    duplicates: int
    """Results that were refused: of lost leases, or of groups that have one."""
    balanced: bool
    """The states add up to what was issued, and agree with the recorded batches and, in a running
    broker, with its memory."""

    def to_dict(self) -> dict[str, Any]:
        """As `headway inspect --json` prints it."""
        return asdict(self)


def read_accounting(run_directory: Path) -> Accounting:
    """The accounts of a run, dead or alive.

    Raises:
        InputError: There is no run in the directory.
        LedgerError: Its ledger cannot be read.
    """
    with open_ledger(run_directory) as database:
        return account(count_rows(database))


def is_open(run_directory: Path) -> bool:
    """Whether a living broker holds the run; False where there is none, or no such folder.

    The lock is tried for an instant, so a broker that opens the run in that very instant is refused
    as if another were alive.

    Raises:
        LedgerError: The lock cannot be tried.
    """
    path = run_directory / LOCK_NAME
    try:
        with path.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise LedgerError(f"{path}: cannot be tried: {error}") from error
    return False


def newest_checkpoint(run_directory: Path) -> tuple[int, Path] | None:
    """Version and folder of a run's newest committed checkpoint, of a run dead or alive.

    Only folders that are there count; None where no checkpoint has one. A recorded path that is
    relative begins at the run's folder.

    Raises:
        InputError: There is no run in the directory.
        LedgerError: Its ledger cannot be read.
    """
    with open_ledger(run_directory) as database:
        return next(_checkpoints(database, run_directory, "DESC"), None)


def oldest_checkpoint(run_directory: Path) -> int | None:
    """Version of the oldest committed checkpoint that is there; raises as `newest_checkpoint`."""
    with open_ledger(run_directory, verify=False) as database:
        found = next(_checkpoints(database, run_directory, "ASC"), None)
    return None if found is None else found[0]


def _checkpoints(
    database: sqlite3.Connection, run_directory: Path, order: str
) -> Iterator[tuple[int, Path]]:
    for version, path in database.execute(
        f"SELECT version, path FROM checkpoints ORDER BY version {order}"
    ):
        if (folder := run_directory / path).is_dir():
            yield version, folder


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedPrompt:
    """A group that failed for good."""

    prompt_id: str
    group_id: str
    purpose: str
    attempts: int
    reason: str
    error: str
    """What the last attempt said."""


def failed_prompts(database: sqlite3.Connection) -> list[FailedPrompt]:
    """Every group of an open ledger that failed for good, in the order of issue."""
    rows = database.execute(
        "SELECT prompt_id, group_id, purpose, attempt, reason, coalesce(error, '')"
        " FROM groups WHERE state = 'failed' ORDER BY number"
    )
    names = ("prompt_id", "group_id", "purpose", "attempts", "reason", "error")
    return [FailedPrompt(**dict(zip(names, row, strict=True))) for row in rows]


def removed_groups(run_directory: Path) -> int:
    """Number of accepted groups whose rollouts `retention` removed; raises likewise."""
    with open_ledger(run_directory) as database:
        gone = removed_segments(database)
        counts = database.execute("SELECT segment, count(*) FROM results GROUP BY segment")
        return sum(count for segment, count in counts if segment in gone)


def removed_segments(database: sqlite3.Connection) -> set[int]:
    """Segments that are gone because nothing needs them any more."""
    rows = database.execute("SELECT key FROM meta").fetchall()
    return {
        int(key.removeprefix(REMOVED_SEGMENT)) for (key,) in rows if key.startswith(REMOVED_SEGMENT)
    }


def read_batches(run_directory: Path) -> list[dict[str, Any]]:
    """Statistics of every trained batch with its `version`, oldest first, of a run dead or alive.

    Raises:
        InputError: There is no run in the directory.
        LedgerError: Its ledger cannot be read.
    """
    with open_ledger(run_directory) as database:
        rows = database.execute(
            "SELECT version, statistics FROM batches WHERE acked_at IS NOT NULL ORDER BY version"
        )
        return [{"version": version, **json.loads(text)} for version, text in rows]


def export_parquet(run_directory: Path, file: Path) -> int:
    """Write every journaled rollout of a run to Parquet; returns the number of rows.

    Those that `queues.broker.retention` removed are left out; `removed_groups` counts them.

    Columns are those of `queues.schema.SCHEMA`, `state` and `trained_version` (null: untrained).

    The file appears when it is complete.

    Raises:
        InputError: There is no run in the directory, or the file exists or cannot be written.
        LedgerError: The ledger cannot be read.
        JournalError: A journaled group cannot be read back.
    """
    from queues.schema import write_parquet  # the accounts themselves do without Arrow

    if file.exists():
        raise InputError(f"{file} exists; name a file that does not")
    partial = file.with_name(f".{file.name}.partial")
    journal = run_directory / JOURNAL_NAME
    with open_ledger(run_directory) as database:
        gone = removed_segments(database)
        rows = database.execute(
            "SELECT segment, offset, state, trained_version FROM results"
            " JOIN groups USING (group_id) WHERE segment IS NOT NULL ORDER BY segment, offset"
        )
        groups = (
            (read_group(journal, segment, offset), state, trained_version)
            for segment, offset, state, trained_version in rows
            if segment not in gone
        )
        try:
            count = write_parquet(groups, partial)
            partial.rename(file)
        except OSError as error:
            raise InputError(f"{file}: cannot be written: {error}") from error
        finally:
            partial.unlink(missing_ok=True)
    return count


def account(counts: Counts, memory: StateCounts | None = None) -> Accounting:
    """The accounts from the counted rows, held against a running broker's memory if given."""
    states = {state: _by_reason(counts.states, state) for state in State}
    totals = {state: sum(reasons.values()) for state, reasons in states.items()}
    return Accounting(
        issued=counts.issued,
        queued=totals[State.QUEUED],
        leased=totals[State.LEASED],
        ready=totals[State.READY],
        taken=totals[State.TAKEN],
        trained=totals[State.TRAINED],
        dropped=states[State.DROPPED],
        failed=states[State.FAILED],
        trained_twice=counts.trained_twice,
        duplicates=counts.duplicates,
        balanced=(
            counts.issued == sum(totals.values())
            and counts.in_batches == {False: totals[State.TAKEN], True: totals[State.TRAINED]}
            and counts.trained_twice == 0
            and (memory is None or memory == counts.states)
        ),
    )


def _by_reason(states: StateCounts, wanted: State) -> dict[str, int]:
    return {
        reason: count
        for (purpose, state, reason), count in states.items()
        if purpose is Purpose.TRAIN and state is wanted
    }


@contextmanager
def open_ledger(run_directory: Path, *, verify: bool = True) -> Iterator[sqlite3.Connection]:
    """The ledger, read-only, as it is at one moment.

    Args:
        run_directory: The run's folder.
        verify: Compare every row with its checksum first (`queues.storage.row_checksums`).
    """
    path = run_directory / FILE_NAME
    if not path.is_file():
        raise InputError(f"{run_directory}: no {FILE_NAME} here, so it is not the folder of a run")
    try:
        database = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
        try:
            check_schema_version(database, path)
            database.execute("BEGIN")
            if verify:
                check(database, path)
            yield database
        finally:
            database.close()
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise LedgerError(f"{path}: cannot be read: {error}") from error

"""The accounts of a run, read from its ledger: is every issued group in exactly one state?

The run may be running. Every function that takes a run's folder raises InputError if it holds no
run, and LedgerError if its ledger cannot be read.
"""

import fcntl
import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from queues.errors import AccountingError, InputError, LedgerError
from queues.records import Purpose
from queues.runtime.atomic_file import atomic_file
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
    """The train groups of a run by state; dropped and failed groups by reason.

    issued = queued + leased + ready + taken + trained + Σ dropped + Σ failed
    """

    issued: int
    """Counted when they are issued, not by adding up the states."""
    queued: int
    leased: int
    ready: int
    taken: int
    trained: int
    dropped: dict[str, int]
    failed: dict[str, int]
    trained_twice: int
    duplicates: int
    """Results that were refused: of lost leases, or of groups that have one."""
    balanced: bool
    """The states add up to what was issued, and agree with the recorded batches and, in a running
    broker, with its memory."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON values that `headway inspect --json` prints."""
        return asdict(self)


def read_accounting(run_directory: Path) -> Accounting:
    """Return the accounts of a run, running or not."""
    with open_ledger(run_directory) as database:
        return account(count_rows(database))


def is_open(run_directory: Path) -> bool:
    """Return True if a living broker holds the run; False if there is no broker or no folder.

    The lock is taken for an instant: a broker that opens the run at that moment is refused.
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


def committed_checkpoints(run_directory: Path, *, verify: bool = True) -> dict[int, Path]:
    """Return the existing folders of a run's committed checkpoints, by version, ascending."""
    with open_ledger(run_directory, verify=verify) as database:
        rows = database.execute("SELECT version, path FROM checkpoints ORDER BY version").fetchall()
    folders = {version: run_directory / path for version, path in rows}
    return {version: folder for version, folder in folders.items() if folder.is_dir()}


def newest_checkpoint(run_directory: Path) -> tuple[int, Path] | None:
    """Return version and folder of the newest of `committed_checkpoints`; None without any."""
    return max(committed_checkpoints(run_directory).items(), default=None)


@dataclass(frozen=True, slots=True)
class FailedPrompt:
    """A group that failed for good."""

    prompt_id: str
    group_id: str
    purpose: str
    attempts: int
    reason: str
    error: str
    """Error of the last attempt."""


def failed_prompts(database: sqlite3.Connection) -> list[FailedPrompt]:
    """Return every group of an open ledger that failed for good, in the order of issue."""
    rows = database.execute(
        "SELECT prompt_id, group_id, purpose, attempt, reason, coalesce(error, '')"
        " FROM groups WHERE state = 'failed' ORDER BY number"
    )
    return [FailedPrompt(*row) for row in rows]


def removed_groups(run_directory: Path) -> int:
    """Return the number of accepted groups whose rollouts `queues.broker.retention` removed."""
    with open_ledger(run_directory) as database:
        removed = removed_segments(database)
        counts = database.execute("SELECT segment, count(*) FROM results GROUP BY segment")
        return sum(count for segment, count in counts if segment in removed)


def removed_segments(database: sqlite3.Connection) -> set[int]:
    """Return the segments that `queues.broker.retention` removed."""
    keys = [key for (key,) in database.execute("SELECT key FROM meta")]
    return {int(x.removeprefix(REMOVED_SEGMENT)) for x in keys if x.startswith(REMOVED_SEGMENT)}


def read_batches(run_directory: Path) -> list[dict[str, Any]]:
    """Return the statistics of every trained batch with its `version`, oldest first."""
    with open_ledger(run_directory) as database:
        rows = database.execute(
            "SELECT version, statistics FROM batches WHERE acked_at IS NOT NULL ORDER BY version"
        )
        return [{"version": version, **json.loads(text)} for version, text in rows]


def export_parquet(run_directory: Path, file: Path) -> int:
    """Write every journaled rollout of a run to Parquet; return the number of rows.

    Columns are those of `queues.schema.SCHEMA`, `state` and `trained_version` (null: untrained).
    Removed rollouts are left out; `removed_groups` counts them. Raises InputError if the file
    exists or cannot be written, and JournalError if a group cannot be read back.
    """
    from queues.schema import write_parquet  # the accounts themselves need no Arrow

    if file.exists():
        raise InputError(f"{file} exists; name a file that does not")
    journal = run_directory / JOURNAL_NAME
    with open_ledger(run_directory) as database:
        removed = removed_segments(database)
        rows = database.execute(
            "SELECT segment, offset, state, trained_version FROM results"
            " JOIN groups USING (group_id) WHERE segment IS NOT NULL ORDER BY segment, offset"
        )
        groups = (
            (read_group(journal, segment, offset), state, trained_version)
            for segment, offset, state, trained_version in rows
            if segment not in removed
        )
        try:
            with atomic_file(file) as opened:
                return write_parquet(groups, opened)
        except OSError as error:
            raise InputError(f"{file}: cannot be written: {error}") from error


def account(counts: Counts, memory: StateCounts | None = None) -> Accounting:
    """Return the accounts of counted rows, compared with a running broker's memory if given."""
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


def require_balanced(counts: Counts, memory: StateCounts, *, where: str) -> None:
    """Raise AccountingError unless counted rows and a broker's memory agree and add up."""
    if not account(counts, memory).balanced:
        raise AccountingError(
            f"{where}: the groups do not add up: in the ledger {counts}, in memory {memory}"
        )


def _by_reason(states: StateCounts, wanted: State) -> dict[str, int]:
    return {
        reason: count
        for (purpose, state, reason), count in states.items()
        if purpose is Purpose.TRAIN and state is wanted
    }


@contextmanager
def open_ledger(run_directory: Path, *, verify: bool = True) -> Iterator[sqlite3.Connection]:
    """Open a ledger read-only, as it is at one moment.

    `verify` compares the rows with their checksums first (`queues.storage.row_checksums`).
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

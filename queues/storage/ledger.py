"""The run's books: one SQLite database (WAL) in which every change of state is a row.

The ledger records what the broker decided; it decides nothing. All methods block and belong to one
thread (`queues.storage.group_commit`), inside a transaction that the writer begins and commits;
only opening, `remember`, `load`, `checkpoint` and `close` are called outside it.
`queues.readers.accounting` reads a run from elsewhere.
"""

import fcntl
import json
import logging
import sqlite3
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from queues.errors import InputError, LedgerError
from queues.records import Lease, Prompt, Purpose, Summary
from queues.runtime.disk_space import is_full
from queues.state.evaluations import EvaluationRun
from queues.state.groups import OVERDUE, Acceptance, Group, State
from queues.state.partial_groups import PartialGroups
from queues.storage.journal import Location
from queues.storage.ledger_schema import (
    FILE_NAME,
    JOURNAL_NAME,
    LOCK_NAME,
    add_later_parts,
    check_schema_version,
    create_tables,
)
from queues.storage.row_checksums import check, protect
from queues.storage.snapshot import Snapshot, read_snapshot
from queues.storage.state_counts import Counts, count_rows, keep_counts, kept_counts

log = logging.getLogger(__name__)
DROPPED_SINCE_TAKE = "dropped_since_take"
LET_THROUGH = "let_through"
"""Counters of what `queues.policy.dynamic_sampling` did."""


class Ledger:
    """The writing end; one for a run at a time.

    Raises:
        LedgerError: The database cannot be opened, is another broker's, or of another version.
    """

    def __init__(self, directory: Path, *, synchronous: Literal["full", "normal"]) -> None:
        path = directory / FILE_NAME
        self.directory = directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = (directory / LOCK_NAME).open("w")
            # Opened in the thread that recovers, used in the writer's from then on.
            self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            raise LedgerError(f"{path}: cannot be opened: {error}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._database.row_factory = sqlite3.Row
            self._execute("PRAGMA journal_mode = WAL")
            self._execute(f"PRAGMA synchronous = {synchronous.upper()}")
            self._execute("PRAGMA foreign_keys = ON")
            self._create_tables(directory)
            check_schema_version(self._database, path)
            check(self._database, path)
            add_later_parts(self._database)
            self.partials = PartialGroups(self._database)
            protect(self._database)
            keep_counts(self._database)
        except BlockingIOError as error:
            self._release()
            raise LedgerError(f"{path}: another broker of this run is alive") from error
        except (sqlite3.Error, UnicodeDecodeError) as error:
            self._release()
            full = is_full(error, directory)
            what = f"no space is left on the disk of {directory}" if full else "not a ledger"
            raise LedgerError(f"{path}: {what}: {error}") from error
        except LedgerError:
            self._release()
            raise

    def begin(self) -> None:
        """Begin the transaction that all changes are part of."""
        self._execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        """Make all changes since `begin` durable."""
        self._execute("COMMIT")

    def rollback(self) -> None:
        """Forget all changes since `begin`."""
        if self._database.in_transaction:
            self._execute("ROLLBACK")

    def checkpoint(self) -> None:
        """Move everything into `ledger.sqlite`, so that this file alone is the whole ledger.

        SQLite does so by itself only when nobody else has the database open.

        Raises:
            LedgerError: A reader held the write-ahead log for as long as SQLite waits (5 s).
        """
        try:
            busy, *_ = self._execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        except sqlite3.Error as error:
            raise LedgerError(f"{FILE_NAME}: no checkpoint of its -wal file: {error}") from error
        if busy:
            raise LedgerError(f"{FILE_NAME}: its -wal file is held by a reader, copy it as well")

    def close(self) -> None:
        """Close the database, in one file where nobody reads it; another broker may go on."""
        try:
            self.checkpoint()
        except LedgerError as error:
            log.warning("closing the ledger: %s", error)
        self._release()

    def _release(self) -> None:
        self._database.close()
        self._lock.close()

    # --- prompts

    def issue(
        self, groups: Sequence[Group], texts: Sequence[str], cursor: str, *, last: bool
    ) -> None:
        """Record train groups, their prompts as JSON, the source's cursor and whether it ended."""
        self._insert_groups(groups, texts)
        self._count("issued", len(groups))
        self._execute("INSERT OR REPLACE INTO meta VALUES ('cursor', ?)", (cursor,))
        if last:
            self.remember("ended", "true")

    def evaluate(self, run: EvaluationRun, groups: Sequence[Group], texts: Sequence[str]) -> None:
        """Record an evaluation, its groups and their prompts as JSON."""
        self._execute(
            "INSERT INTO evaluations (name, temperature, min_version, count) VALUES (?, ?, ?, ?)",
            (run.name, run.temperature, run.min_version, run.count),
        )
        self._insert_groups(groups, texts)

    # --- leases and results

    def lease(self, engine_id: str, leases: Sequence[Lease]) -> None:
        """Record leases, and when the first of an evaluation was."""
        now = time.time()
        self._database.executemany(
            "UPDATE groups SET state = 'leased', attempt = ?, engine_id = ?, start_version = ?,"
            " deadline_version = ?, leased_at = ? WHERE group_id = ?",
            [
                (x.attempt, engine_id, x.start_version, x.deadline_version, now, x.group_id)
                for x in leases
            ],
        )
        self._database.executemany(
            "UPDATE evaluations SET started_at = coalesce(started_at, ?)"
            " WHERE name = (SELECT evaluation FROM groups WHERE group_id = ?)",
            [(now, x.group_id) for x in leases if x.purpose is Purpose.EVALUATE],
        )

    def redeliver(self, group_id: str, error: str) -> None:
        """Record that a lease was given back or lost."""
        self._execute(
            "UPDATE groups SET state = 'queued', error = ? WHERE group_id = ?", (error, group_id)
        )

    def fail(self, group_id: str, reason: str, error: str) -> None:
        """Record that a group used up its attempts, or waits for what will never come."""
        self._execute(
            "UPDATE groups SET state = 'failed', reason = ?, error = ? WHERE group_id = ?",
            (reason, error, group_id),
        )
        self.partials.forget(group_id)
        self._advance_evaluation(group_id)

    def accept(self, result: Summary, location: Location | None, accepted: Acceptance) -> None:
        """Record the one result of a group, where it is journaled, and what it does."""
        self._execute(
            "INSERT INTO results VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                result.group_id,
                result.attempt,
                *(location or (None, None, None)),
                result.rollouts,
                result.tokens,
                result.reward,
                result.oldest_version,
                result.newest_version,
                time.time(),
            ),
        )
        self._execute(
            "UPDATE groups SET state = ?, reason = ? WHERE group_id = ?",
            (accepted.state, accepted.reason, result.group_id),
        )
        self.partials.forget(result.group_id)
        if accepted.state is State.SCORED:
            self._advance_evaluation(result.group_id)
        self._count(DROPPED_SINCE_TAKE, accepted.state is State.DROPPED)
        self._count(LET_THROUGH, accepted.let_through)
        if accepted.retires is not None:
            self._execute("INSERT INTO retired VALUES (?, ?)", (accepted.retires, result.group_id))

    def reissue(self, reissues: Sequence[tuple[Group, Group]], version: int) -> None:
        """Record groups that are overdue, each with the one that its prompt is issued anew as.

        Args:
            reissues: Those that are dropped, and those that take their place.
            version: That of the batch which was taken without them.
        """
        now = time.time()
        self._database.executemany(
            "UPDATE groups SET state = ?, reason = ?, dropped_at = ?, dropped_version = ?"
            " WHERE group_id = ?",
            [(State.DROPPED, OVERDUE, now, version, old.group_id) for old, _ in reissues],
        )
        for dropped, _ in reissues:
            self.partials.forget(dropped.group_id)
        anew = [group for _, group in reissues]
        self._insert_groups(anew, [dump_prompt(group.prompt) for group in anew])
        self._count("issued", len(anew))

    def refuse(self, group_id: str) -> bool | None:
        """Count a put that was not accepted; whether another was, None if the group is unknown."""
        row = self._execute(
            "SELECT accepted_at FROM groups LEFT JOIN results USING (group_id) WHERE group_id = ?",
            (group_id,),
        ).fetchone()
        if row is None:
            return None
        self._count("duplicates", 1)
        return row["accepted_at"] is not None

    # --- batches

    def take(self, version: int, group_ids: Sequence[str]) -> list[Location]:
        """Record the composition of a batch; returns where its groups lie."""
        self._execute(
            "INSERT INTO batches (version, taken_at) VALUES (?, ?)", (version, time.time())
        )
        self._database.executemany(
            "INSERT INTO batch_groups (version, position, group_id) VALUES (?, ?, ?)",
            [(version, position, group_id) for position, group_id in enumerate(group_ids)],
        )
        self._update_batch("state = 'taken'", version)
        self._execute("UPDATE counters SET value = 0 WHERE name = ?", (DROPPED_SINCE_TAKE,))
        return self.locations(version)

    def locations(self, version: int) -> list[Location]:
        """Where the groups of a recorded batch lie, in its order."""
        rows = self._execute(
            "SELECT segment, offset, length FROM batch_groups JOIN results USING (group_id)"
            " WHERE version = ? ORDER BY position",
            (version,),
        )
        return [Location(*row) for row in rows]

    def ack(self, version: int, statistics: str) -> Counts:
        """Record that a batch is trained; returns the counts after it."""
        self._execute(
            "UPDATE batches SET acked_at = ?, statistics = ? WHERE version = ?",
            (time.time(), statistics, version),
        )
        self._update_batch("state = 'trained', trained_version = :version", version)
        return kept_counts(self._database, newest=version)

    def statistics(self, version: int) -> str:
        """What was recorded of a trained batch, as JSON."""
        (text,) = self._execute(
            "SELECT statistics FROM batches WHERE version = ?", (version,)
        ).fetchone()
        return str(text)

    def commit_checkpoint(self, version: int, path: str) -> None:
        """Record a complete checkpoint."""
        self._execute(
            "INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?)", (version, path, time.time())
        )

    # --- books

    def remember(self, key: str, value: str) -> str:
        """Keep a fact of the run, unless it is known; returns the known one."""
        self._execute("INSERT OR IGNORE INTO meta VALUES (?, ?)", (key, value))
        known: str = self._execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()[0]
        return known

    def counts(self) -> Counts:
        """Count the rows, all of them: for who looks at the accounts."""
        return count_rows(self._database)

    def load(self) -> Snapshot:
        """Everything that a new broker goes on from; its predecessor's leases are void."""
        self._execute("UPDATE groups SET state = 'queued' WHERE state = 'leased'")
        return read_snapshot(self._database, self.counts().states)

    def _create_tables(self, directory: Path) -> None:
        """Create them in a new run, in the file itself: what a damaged -wal file loses is less."""
        (there,) = self._execute("SELECT count(*) FROM sqlite_schema").fetchone()
        if there:
            return
        if any((directory / JOURNAL_NAME).glob("*.segment")):
            raise LedgerError(
                f"{directory / FILE_NAME}: empty, but {JOURNAL_NAME}/ holds rollouts of a run; put"
                " the ledger back from a copy"
            )
        create_tables(self._database)
        self._execute("PRAGMA wal_checkpoint(PASSIVE)")

    def _insert_groups(self, groups: Sequence[Group], texts: Sequence[str]) -> None:
        now = time.time()
        self._database.executemany(
            "INSERT INTO groups (number, group_id, prompt_id, purpose, evaluation, prompt, state,"
            " issued_at) VALUES (?, ?, ?, ?, ?, ?, 'queued', ?)",
            [
                (x.number, x.group_id, x.prompt.prompt_id, x.purpose, x.evaluation, text, now)
                for x, text in zip(groups, texts, strict=True)
            ],
        )

    def _advance_evaluation(self, group_id: str) -> None:
        self._execute(
            "UPDATE evaluations SET finished_at = ?"
            " WHERE name = (SELECT evaluation FROM groups WHERE group_id = ?)",
            (time.time(), group_id),
        )

    def _update_batch(self, change: str, version: int) -> None:
        self._execute(
            f"UPDATE groups SET {change} WHERE group_id IN"
            " (SELECT group_id FROM batch_groups WHERE version = :version)",
            {"version": version},
        )

    def _count(self, name: str, change: int) -> None:
        if change:
            self._execute(
                "INSERT INTO counters VALUES (?, ?)"
                " ON CONFLICT (name) DO UPDATE SET value = value + excluded.value",
                (name, change),
            )

    def _execute(self, sql: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> sqlite3.Cursor:
        return self._database.execute(sql, values)


def dump_prompt(prompt: Prompt) -> str:
    """The prompt as JSON.

    Raises:
        InputError: Its metadata is not JSON.
    """
    try:
        return json.dumps({name: getattr(prompt, name) for name in Prompt.__slots__})
    except (TypeError, ValueError) as error:
        raise InputError(f"prompt {prompt.prompt_id!r}: metadata is not JSON: {error}") from error


def load_prompt(text: str) -> Prompt:
    """The prompt that `dump_prompt` wrote."""
    return Prompt(**json.loads(text))

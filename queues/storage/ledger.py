"""The ledger of a run: one SQLite database (WAL) that records every change of state.

All methods block and belong to one thread (`queues.storage.group_commit`), which begins and
commits; only recovery and closing work outside a transaction.
"""

import json
import logging
import sqlite3
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from headway import clock
from headway.errors import InputError
from headway.file_lock import TEST_SECONDS, take
from headway.full_disk import is_full
from queues.errors import LedgerError
from queues.records import Lease, Prompt, Summary
from queues.state.groups import FILTERED, OVERDUE, Acceptance, EvaluationRun, Group, State
from queues.storage.backup import Backup, ChangesConnection
from queues.storage.journal import LOCATION, Location
from queues.storage.ledger_schema import FILE_NAME, LOCK_NAME, open_tables
from queues.storage.state_counts import Counts, count_rows, keep_counts, kept_counts

log = logging.getLogger(__name__)
DROPPED_SINCE_TAKE = "dropped_since_take"
LET_THROUGH = "let_through"
"""Names of the counters of `queues.policy.dynamic_sampling`."""


class Ledger:
    """The writing side of a ledger; one at a time for each run.

    Raises LedgerError if the database cannot be opened, is damaged, or another broker uses it for
    `lock_seconds`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        synchronous: Literal["full", "normal"],
        lock_seconds: float = TEST_SECONDS,
    ) -> None:
        path = directory / FILE_NAME
        self.directory = directory
        self.backup: Backup | None = None
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = (directory / LOCK_NAME).open("w")
            # Opened in the thread that recovers, used in the writer's from then on.
            self.database = sqlite3.connect(
                path, isolation_level=None, check_same_thread=False, factory=ChangesConnection
            )
        except (OSError, sqlite3.Error) as error:
            raise LedgerError(f"{path}: cannot be opened: {error}") from error
        self.execute = self.database.execute
        try:
            take(self._lock.fileno(), seconds=lock_seconds)
            self.database.row_factory = sqlite3.Row
            self.execute("PRAGMA journal_mode = WAL")
            self.execute(f"PRAGMA synchronous = {synchronous.upper()}")
            self.execute("PRAGMA foreign_keys = ON")
            open_tables(self.database, directory)
            keep_counts(self.database)
        except BlockingIOError as error:
            self._release()
            raise LedgerError(f"{path}: another broker of this run is alive") from error
        except (sqlite3.Error, UnicodeDecodeError) as error:
            self._release()
            full = is_full(error, directory)
            reason = f"no space is left on the disk of {directory}" if full else "not a ledger"
            raise LedgerError(f"{path}: {reason}: {error}") from error
        except LedgerError:
            self._release()
            raise

    def begin(self) -> None:
        """Begin a transaction."""
        self.execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        """Make all changes since `begin` durable."""
        self.execute("COMMIT")

    def rollback(self) -> None:
        """Forget all changes since `begin`."""
        if self.database.in_transaction:
            self.execute("ROLLBACK")

    def close(self) -> None:
        """Close the database, as one file if nobody reads it; another broker may open it."""
        if self.backup is not None:
            self.backup.close()
        try:
            busy, *_ = self.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            if busy:  # for as long as SQLite waits, 5 s
                log.warning("a reader holds the -wal file of %s: copy it as well", FILE_NAME)
        except sqlite3.Error as error:
            log.warning("%s: no checkpoint of its -wal file: %s", FILE_NAME, error)
        self._release()

    def _release(self) -> None:
        self.database.close()
        self._lock.close()

    def issue(
        self, groups: Sequence[Group], texts: Sequence[str], cursor: str, *, last: bool
    ) -> None:
        """Record train groups, their prompts as JSON, the source's cursor and whether it ended."""
        self._insert_groups(groups, texts)
        self._count("issued", len(groups))
        self.note("cursor", cursor)
        if last:
            self.remember("ended", "true")

    def evaluate(self, run: EvaluationRun, groups: Sequence[Group], texts: Sequence[str]) -> None:
        """Record an evaluation, its groups and their prompts as JSON."""
        self.execute(
            "INSERT INTO evaluations VALUES (?, ?, ?, ?)",
            (run.name, run.temperature, run.min_version, run.count),
        )
        self._insert_groups(groups, texts)

    def lease(self, engine_id: str, leases: Sequence[Lease]) -> None:
        """Record leases."""
        now = clock.now()
        self.database.executemany(
            "UPDATE groups SET state = 'leased', attempt = ?, engine_id = ?, start_version = ?,"
            " deadline_version = ?, leased_at = ? WHERE group_id = ?",
            [
                (x.attempt, engine_id, x.start_version, x.deadline_version, now, x.group_id)
                for x in leases
            ],
        )

    def redeliver(self, group_id: str, error: str) -> None:
        """Record that a lease was given back or lost."""
        self.execute(
            "UPDATE groups SET state = 'queued', error = ? WHERE group_id = ?", (error, group_id)
        )

    def fail(self, group_id: str, reason: str, error: str) -> None:
        """Record that a group failed for good."""
        self.execute(
            "UPDATE groups SET state = 'failed', reason = ?, error = ?, dropped_at = ?"
            " WHERE group_id = ?",
            (reason, error, clock.now(), group_id),
        )
        self._forget_begun(group_id)

    def accept(self, result: Summary, location: Location | None, accepted: Acceptance) -> None:
        """Record the one result of a group, its location in the journal, and its effect."""
        dropped = accepted.state is State.DROPPED
        self.execute(
            "INSERT INTO results VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                result.group_id,
                result.attempt,
                *(location or (None, None, None, None)),
                result.rollouts,
                result.tokens,
                result.reward,
                result.oldest_version,
                result.newest_version,
                clock.now(),
                accepted.passes,
            ),
        )
        self.execute(
            "UPDATE groups SET state = ?, reason = ? WHERE group_id = ?",
            (accepted.state, FILTERED if dropped else "", result.group_id),
        )
        self._forget_begun(result.group_id)
        if dropped:
            self._count(DROPPED_SINCE_TAKE, 1)
        if accepted.let_through:
            self._count(LET_THROUGH, 1)
        if accepted.retires is not None:
            self.execute("INSERT INTO retired VALUES (?, ?)", (accepted.retires, result.group_id))

    def reissue(self, reissues: Sequence[tuple[Group, Group]], version: int) -> None:
        """Record groups that batch `version` was taken without, and new groups of their prompts."""
        now = clock.now()
        self.database.executemany(
            "UPDATE groups SET state = ?, reason = ?, dropped_at = ?, dropped_version = ?"
            " WHERE group_id = ?",
            [(State.DROPPED, OVERDUE, now, version, old.group_id) for old, _ in reissues],
        )
        for dropped, _ in reissues:
            self._forget_begun(dropped.group_id)
        new = [group for _, group in reissues]
        self._insert_groups(new, [dump_prompt(group.prompt) for group in new])
        self._count("issued", len(new))

    def refuse(self, group_id: str) -> bool | None:
        """Count a refused put; return True if the group has a result, None if it is unknown."""
        row = self.execute(
            "SELECT accepted_at FROM groups LEFT JOIN results USING (group_id) WHERE group_id = ?",
            (group_id,),
        ).fetchone()
        if row is None:
            return None
        self._count("duplicates", 1)
        return row["accepted_at"] is not None

    def take(self, version: int, group_ids: Sequence[str]) -> list[Location]:
        """Record the composition of a batch; return the locations of its groups."""
        row = (version, clock.now())
        self.execute("INSERT INTO batches (version, taken_at) VALUES (?, ?)", row, urgent=True)
        self.database.executemany(
            "INSERT INTO batch_groups (version, position, group_id) VALUES (?, ?, ?)",
            [(version, position, group_id) for position, group_id in enumerate(group_ids)],
        )
        self._update_batch("state = 'taken'", version)
        self.execute("UPDATE counters SET value = 0 WHERE name = ?", (DROPPED_SINCE_TAKE,))
        return self.locations(version)

    def locations(self, version: int) -> list[Location]:
        """Return the locations of the groups of a recorded batch, in its order."""
        rows = self.execute(
            f"SELECT {LOCATION} FROM batch_groups JOIN results USING (group_id)"
            " WHERE version = ? ORDER BY position",
            (version,),
        )
        return [Location(*row) for row in rows]

    def ack(self, version: int, statistics: str) -> Counts:
        """Record that a batch is trained; return the counts after it."""
        self.execute(
            "UPDATE batches SET acked_at = ?, statistics = ? WHERE version = ?",
            (clock.now(), statistics, version),
            urgent=True,
        )
        self._update_batch("state = 'trained', trained_version = :version", version)
        return kept_counts(self.database, newest=version)

    def statistics(self, version: int) -> str:
        """Return the recorded statistics of a trained batch, as JSON."""
        (text,) = self.execute(
            "SELECT statistics FROM batches WHERE version = ?", (version,)
        ).fetchone()
        return str(text)

    def replace_statistics(self, version: int, text: str) -> None:
        """Replace the recorded statistics of a trained batch, given as JSON."""
        change = "UPDATE batches SET statistics = ? WHERE version = ?"
        self.execute(change, (text, version), urgent=True)

    def commit_checkpoint(self, version: int, path: str) -> None:
        """Record a complete checkpoint."""
        row = (version, path, clock.now())
        self.execute("INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?)", row, urgent=True)

    def save_partial(self, group_id: str, oldest_version: int, payload: bytes) -> None:
        """Save the sampled tokens of a group without a result, replacing earlier ones.

        The payload is a group of `queues.schema` whose unfinished rollouts are `aborted`.
        """
        self.execute(
            "INSERT OR REPLACE INTO partials VALUES (?, ?, ?)", (group_id, oldest_version, payload)
        )

    def keep_note(self, row: tuple[str, int, str, int | None, bytes]) -> bytes:
        """Keep a note, a row of `notes`, unless there is one of its name; return the kept one."""
        self.execute("INSERT OR IGNORE INTO notes VALUES (?, ?, ?, ?, ?)", row)
        payload: bytes = self.execute(
            "SELECT payload FROM notes WHERE (group_id, sample_index, name) = (?, ?, ?)", row[:3]
        ).fetchone()[0]
        return payload

    def with_begun(self, lease: Lease, *, saved: bool, noted: bool) -> Lease:
        """Return a lease with what its group goes on from; delete what it does not go on from."""
        self._forget_begun(lease.group_id, saved=not saved, notes=not noted)
        key = (lease.group_id,)
        partial = self.execute("SELECT payload FROM partials WHERE group_id = ?", key).fetchone()
        rows = self.execute("SELECT sample_index, name, payload FROM notes WHERE group_id = ?", key)
        return replace(
            lease,
            saved=None if partial is None else partial[0],
            notes={(index, name): payload for index, name, payload in rows},
        )

    def oldest(self, table: Literal["partials", "notes"]) -> dict[str, int | None]:
        """Return the oldest version in the saved tokens or notes of every group that has any."""
        select = f"SELECT group_id, min(oldest_version) FROM {table} GROUP BY group_id"
        return dict(self.execute(select).fetchall())

    def remember(self, key: str, value: str) -> str:
        """Record a value of the run, unless the key has one; return the recorded value."""
        self.execute("INSERT OR IGNORE INTO meta VALUES (?, ?)", (key, value))
        known: str = self.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()[0]
        return known

    def note(self, key: str, value: str) -> None:
        """Record a value of the run, in the place of an earlier one."""
        self.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def forget(self, pattern: str) -> None:
        """Remove the values whose keys match a pattern of SQLite's GLOB."""
        self.execute("DELETE FROM meta WHERE key GLOB ?", (pattern,))

    def counts(self) -> Counts:
        """Count all rows; the time grows with the run."""
        return count_rows(self.database)

    def _insert_groups(self, groups: Sequence[Group], texts: Sequence[str]) -> None:
        now = clock.now()
        self.database.executemany(
            "INSERT INTO groups (number, group_id, prompt_id, purpose, evaluation, prompt, state,"
            " issued_at) VALUES (?, ?, ?, ?, ?, ?, 'queued', ?)",
            [
                (x.number, x.group_id, x.prompt.prompt_id, x.purpose, x.evaluation, text, now)
                for x, text in zip(groups, texts, strict=True)
            ],
        )

    def _forget_begun(self, group_id: str, *, saved: bool = True, notes: bool = True) -> None:
        for table, forgets in (("partials", saved), ("notes", notes)):
            if forgets:
                self.execute(f"DELETE FROM {table} WHERE group_id = ?", (group_id,))

    def _update_batch(self, change: str, version: int) -> None:
        self.execute(
            f"UPDATE groups SET {change} WHERE group_id IN"
            " (SELECT group_id FROM batch_groups WHERE version = :version)",
            {"version": version},
        )

    def _count(self, name: str, change: int) -> None:
        self.execute(
            "INSERT INTO counters VALUES (?, ?)"
            " ON CONFLICT (name) DO UPDATE SET value = value + excluded.value",
            (name, change),
        )


def dump_prompt(prompt: Prompt) -> str:
    """Return the prompt as JSON; InputError if its metadata is not JSON."""
    try:
        return json.dumps({name: getattr(prompt, name) for name in Prompt.__slots__})
    except (TypeError, ValueError) as error:
        raise InputError(f"prompt {prompt.prompt_id!r}: metadata is not JSON: {error}") from error


def load_prompt(text: str) -> Prompt:
    """Return the prompt that `dump_prompt` wrote."""
    return Prompt(**json.loads(text))

"""The tables of the ledger, their version, and the names of the files around it.

`queues.storage.ledger` writes the tables, `queues.readers` reads them.
"""

import json
import sqlite3
from pathlib import Path
from typing import Any

from queues.errors import LedgerError
from queues.storage.row_checksums import check, protect, register

SCHEMA_VERSION = 7
FILE_NAME = "ledger.sqlite"
LOCK_NAME = "ledger.lock"
"""Locked by the broker while it lives."""
JOURNAL_NAME = "journal"
"""The folder of the journal's segments."""
REMOVED_SEGMENT = "removed_segment_"
"""Prefix of keys in `meta`: segments that `queues.broker.retention` removed, with the time."""
IS_REMOVED = f"'{REMOVED_SEGMENT}' || segment IN (SELECT key FROM meta)"
"""Condition of SQL on a row of `results`: its segment was removed."""
SESSION = "session_"
"""Prefix of keys in `meta`: what each session of the run began with, as JSON."""
OWNER = "owner"
"""Key in `meta`: the name under which the last broker was made, and may be made again."""
SERVES = "serves_"
"""Prefix of keys in `meta`: the version that each engine serves, for a broker made again."""
EPOCH = "learner_epoch"
"""Key in `meta`: the epoch of the learner, for a broker made again."""
ISSUE_TOKEN = "issue_token"
"""Key in `meta`: the token of the last call of `issue`."""

_TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE groups (
    number INTEGER PRIMARY KEY,             -- order of issue
    group_id TEXT NOT NULL UNIQUE,
    prompt_id TEXT NOT NULL,
    purpose TEXT NOT NULL,                  -- queues.records.Purpose
    evaluation TEXT REFERENCES evaluations (name),
    prompt TEXT NOT NULL,                   -- JSON of queues.records.Prompt
    state TEXT NOT NULL,                    -- queues.state.groups.State
    reason TEXT NOT NULL DEFAULT '',        -- of failed and dropped
    error TEXT,                             -- of the last failed attempt
    attempt INTEGER NOT NULL DEFAULT 0,
    engine_id TEXT,
    start_version INTEGER,
    deadline_version INTEGER,
    trained_version INTEGER,
    issued_at REAL NOT NULL,
    leased_at REAL,                         -- latest lease, epoch seconds
    dropped_at REAL,                        -- of overdue and failed groups, epoch seconds
    dropped_version INTEGER                 -- of overdue groups: the batch taken without them
) STRICT;
CREATE INDEX groups_by_state ON groups (purpose, state, reason);
CREATE TABLE results (                      -- at most one accepted result for each group
    group_id TEXT PRIMARY KEY REFERENCES groups (group_id),
    attempt INTEGER NOT NULL,
    segment INTEGER,                        -- of the journal, NULL for evaluations
    offset INTEGER,
    length INTEGER,
    checksum INTEGER,                       -- of the payload
    rollouts INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    reward REAL NOT NULL,
    oldest_version INTEGER,
    newest_version INTEGER,
    accepted_at REAL NOT NULL,
    passes INTEGER                          -- rollouts that passed, NULL for evaluations
) STRICT, WITHOUT ROWID;
CREATE TABLE batches (
    version INTEGER PRIMARY KEY,
    taken_at REAL NOT NULL,
    acked_at REAL,
    statistics TEXT                         -- JSON, from the learner
) STRICT;
CREATE TABLE batch_groups (
    version INTEGER NOT NULL REFERENCES batches (version),
    position INTEGER NOT NULL,
    group_id TEXT NOT NULL REFERENCES groups (group_id),
    PRIMARY KEY (version, position)
) STRICT, WITHOUT ROWID;
CREATE INDEX batches_of_group ON batch_groups (group_id);
CREATE TABLE checkpoints (version INTEGER PRIMARY KEY, path TEXT NOT NULL, at REAL NOT NULL) STRICT;
CREATE TABLE evaluations (
    name TEXT PRIMARY KEY,
    temperature REAL NOT NULL,
    min_version INTEGER NOT NULL,
    count INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE retired (                      -- prompts that are not issued again
    prompt TEXT PRIMARY KEY,                -- prompt_id without the epoch
    group_id TEXT NOT NULL REFERENCES groups (group_id)
) STRICT, WITHOUT ROWID;
CREATE TABLE partials (                     -- at most one for a group without a result
    group_id TEXT PRIMARY KEY REFERENCES groups (group_id),
    oldest_version INTEGER NOT NULL,
    payload BLOB NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE notes (                        -- about rollouts of groups without a result
    group_id TEXT NOT NULL REFERENCES groups (group_id),
    sample_index INTEGER NOT NULL,
    name TEXT NOT NULL,                     -- see queues.protocols.WorkQueue.note
    oldest_version INTEGER,
    payload BLOB NOT NULL,
    PRIMARY KEY (group_id, sample_index, name)
) STRICT, WITHOUT ROWID
"""


def open_tables(database: sqlite3.Connection, directory: Path) -> None:
    """Create the tables of a new run, or check those of another one, before they are written.

    They are created in the file itself, so that no -wal file can lose them.

    Raises:
        LedgerError: It is damaged, of another version, or empty although there are rollouts.
    """
    path = directory / FILE_NAME
    (existing,) = database.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    if existing:
        check_schema_version(database, path)
    elif any((directory / JOURNAL_NAME).glob("*.segment")):
        raise LedgerError(
            f"{path}: empty, but {JOURNAL_NAME}/ holds rollouts of a run; put it back from a copy"
        )
    register(database)
    if not existing:
        create_tables(database)
        database.execute("PRAGMA wal_checkpoint(PASSIVE)")
    check(database, path)


def create_tables(database: sqlite3.Connection) -> None:
    """Create the tables and their checksums in an empty database, in one transaction."""
    database.execute("BEGIN IMMEDIATE")
    for statement in _TABLES.split(";"):
        database.execute(statement)
    protect(database)
    database.execute("INSERT INTO meta VALUES ('schema_version', ?)", (str(SCHEMA_VERSION),))
    database.execute("INSERT INTO counters VALUES ('issued', 0), ('duplicates', 0)")
    database.execute("COMMIT")


def check_schema_version(database: sqlite3.Connection, path: Path) -> None:
    """Raise LedgerError for a ledger of another schema version, or of another program."""
    try:
        row = database.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise LedgerError(f"{path}: not a ledger: {error}") from error
    version = row[0] if row else "none"
    if version != str(SCHEMA_VERSION):
        raise LedgerError(f"{path}: schema version {version}, this Headway reads {SCHEMA_VERSION}")


def sessions_of(database: sqlite3.Connection) -> list[dict[str, Any]]:
    """Return what each session of the run began with, in their order."""
    rows = database.execute(
        "SELECT value FROM meta WHERE key GLOB ? ORDER BY key", (f"{SESSION}*",)
    ).fetchall()
    try:
        return [json.loads(text) for (text,) in rows]
    except ValueError as error:
        raise LedgerError(f"{FILE_NAME}: damaged: a session is no JSON: {error}") from error

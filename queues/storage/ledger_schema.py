"""The tables of the ledger, their version, and the names of the files around it.

What they mean is in the comments; who writes them is `queues.storage.ledger`, who only reads them
is `queues.readers.accounting`.
"""

import sqlite3
from pathlib import Path

from queues.errors import LedgerError

SCHEMA_VERSION = 1
FILE_NAME = "ledger.sqlite"
LOCK_NAME = "ledger.lock"
"""Locked by the broker while it lives."""
JOURNAL_NAME = "journal"
"""The folder of the journal's segments."""
REMOVED_SEGMENT = "removed_segment_"
"""Keys of `meta` that begin so tell which segments `queues.broker.retention` removed, and when."""

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
    error TEXT,                             -- what the last failed attempt said
    attempt INTEGER NOT NULL DEFAULT 0,
    engine_id TEXT,
    start_version INTEGER,
    deadline_version INTEGER,
    trained_version INTEGER,
    issued_at REAL NOT NULL
) STRICT;
CREATE INDEX groups_by_state ON groups (purpose, state, reason);
CREATE TABLE results (                      -- at most one accepted result for each group
    group_id TEXT PRIMARY KEY REFERENCES groups (group_id),
    attempt INTEGER NOT NULL,
    segment INTEGER,                        -- journal; NULL for evaluations
    offset INTEGER,
    length INTEGER,
    rollouts INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    reward REAL NOT NULL,
    oldest_version INTEGER,
    newest_version INTEGER,
    accepted_at REAL NOT NULL
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
    count INTEGER NOT NULL,
    started_at REAL,                        -- first lease
    finished_at REAL                        -- last result
) STRICT, WITHOUT ROWID;
"""


_LATER_TABLES = """
CREATE TABLE IF NOT EXISTS retired (        -- prompts that are not issued again
    prompt TEXT PRIMARY KEY,                -- prompt_id without the epoch
    group_id TEXT NOT NULL REFERENCES groups (group_id)
) STRICT, WITHOUT ROWID;
"""
"""What ledgers of this schema version may lack that were begun earlier."""
LATER_COLUMNS = {
    "leased_at": "REAL",  # the latest lease, epoch seconds
    "dropped_at": "REAL",  # of overdue groups, epoch seconds
    "dropped_version": "INTEGER",  # of overdue groups: the batch that was taken without them
}
"""Of `groups`, the same."""


def create_tables(database: sqlite3.Connection) -> None:
    """Create the tables in an empty database; leaves any other as it is."""
    if database.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
        return
    database.executescript(
        f"BEGIN; {_TABLES} INSERT INTO meta VALUES ('schema_version', '{SCHEMA_VERSION}');"
        " INSERT INTO counters VALUES ('issued', 0), ('duplicates', 0); COMMIT;"
    )


def add_later_parts(database: sqlite3.Connection) -> None:
    """Create what a ledger of an earlier Headway lacks; nobody who only reads needs it."""
    database.executescript(_LATER_TABLES)
    known = {row[1] for row in database.execute("PRAGMA table_info(groups)")}
    for name, type_ in LATER_COLUMNS.items():
        if name not in known:
            database.execute(f"ALTER TABLE groups ADD COLUMN {name} {type_}")


def check_schema_version(database: sqlite3.Connection, path: Path) -> None:
    """Refuse a ledger that another version of Headway wrote, or another program."""
    try:
        row = database.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise LedgerError(f"{path}: not a ledger: {error}") from error
    found = row[0] if row else "none"
    if found != str(SCHEMA_VERSION):
        raise LedgerError(f"{path}: schema version {found}, this Headway reads {SCHEMA_VERSION}")

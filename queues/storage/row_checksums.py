"""Whether the rows of a ledger are those that were written.

SQLite checksums its write-ahead log, so a damaged one ends where the damage begins, but not its
pages: a flipped bit in one would be read as another number. So triggers keep, for every table, the
sum of a hash of each row; it is committed with the rows, and compared with them whenever a ledger
is opened. Rows that were changed, lost or doubled behind the back of SQLite change the sum, and
what keeps rows from being found, `PRAGMA integrity_check` finds. The tables of
`queues.storage.state_counts` have no sum: they are made anew from the rows of the others whenever a
ledger is opened for writing.
"""

import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import xxhash

from queues.errors import LedgerError
from queues.storage.state_counts import KEPT_TABLES

_FUNCTION = "headway_row_hash"
_MASK = 2**62 - 1
"""Sums are modulo 2^62, so that sum + hash − hash never leaves SQLite's integers."""
_SUMS = """
CREATE TABLE IF NOT EXISTS checksums (
    name TEXT PRIMARY KEY,                  -- of a table
    columns TEXT NOT NULL,                  -- that are hashed
    value INTEGER NOT NULL                  -- the sum over its rows
) STRICT, WITHOUT ROWID;
"""


def register(database: sqlite3.Connection) -> None:
    """Give a connection the function that the triggers call; needed by every one that writes."""
    database.create_function(_FUNCTION, -1, _hash, deterministic=True)
    # Else a row that INSERT OR REPLACE takes the place of would stay in the sum.
    database.execute("PRAGMA recursive_triggers = ON")


def protect(database: sqlite3.Connection) -> None:
    """Sum from now on the tables that are not summed yet, or have other columns than they had.

    Call `check` first: what is there is taken for right.
    """
    register(database)
    database.execute(_SUMS)
    known = dict(database.execute("SELECT name, columns FROM checksums").fetchall())
    for table in _tables(database):
        columns = _columns(database, table)
        if known.get(table) == columns:
            continue
        value = _sum(database, table, columns)
        drop = "; ".join(f"DROP TRIGGER IF EXISTS {table}_{event}" for event in _CHANGES)
        create = "; ".join(_triggers(table, columns).values())
        database.executescript(
            f"BEGIN IMMEDIATE; {drop}; {create};"
            f" INSERT OR REPLACE INTO checksums VALUES ('{table}', '{columns}', {value}); COMMIT;"
        )


def check(database: sqlite3.Connection, path: Path) -> None:
    """Read every row and compare: about 7 µs a row, so 20 s for the rows of a million groups.

    Raises:
        LedgerError: The ledger is damaged.
    """
    try:
        (found,) = database.execute("PRAGMA integrity_check(1)").fetchone()
        if found != "ok":
            raise LedgerError(f"{path}: damaged: {found}")
        schema: dict[str, str] = dict(database.execute("SELECT name, sql FROM sqlite_schema"))
        if "checksums" not in schema and not any(name.endswith("_insert") for name in schema):
            return  # begun by an earlier Headway
        sums = database.execute("SELECT name, columns, value FROM checksums").fetchall()
        for table, columns, value in sums:
            intact = all(schema.get(name) == sql for name, sql in _triggers(table, columns).items())
            if not intact or _sum(database, table, columns) != value:
                raise LedgerError(f"{path}: damaged: the rows of {table!r} are not those written")
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise LedgerError(f"{path}: damaged: {error}") from error


_CHANGES = {"insert": "+ {new}", "update": "+ {new} - {old}", "delete": "- {old}"}


def _triggers(table: str, columns: str) -> dict[str, str]:
    """Name and SQL of the triggers of a table, exactly as SQLite keeps it."""
    hashes = {
        row: f"{_FUNCTION}({', '.join(f'{row}.{column}' for column in columns.split())})"
        for row in ("new", "old")
    }
    return {
        f"{table}_{event}": f"CREATE TRIGGER {table}_{event} AFTER {event.upper()} ON {table} BEGIN"
        f" UPDATE checksums SET value = (value {change.format(**hashes)}) & {_MASK}"
        f" WHERE name = '{table}'; END"
        for event, change in _CHANGES.items()
    }


def _tables(database: sqlite3.Connection) -> list[str]:
    rows = database.execute("SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY name")
    others = ("checksums", *KEPT_TABLES)  # what follows from the rows of the tables
    return [name for (name,) in rows if name not in others and not name.startswith("sqlite_")]


def _columns(database: sqlite3.Connection, table: str) -> str:
    rows = database.execute("SELECT name FROM pragma_table_info(?) ORDER BY cid", (table,))
    return " ".join(name for (name,) in rows)


def _sum(database: sqlite3.Connection, table: str, columns: str) -> int:
    rows: Iterable[Any] = database.execute(f"SELECT {', '.join(columns.split())} FROM {table}")
    return sum(_hash(*row) for row in rows) & _MASK


def _hash(*values: Any) -> int:
    short = [xxhash.xxh3_64_digest(each) if isinstance(each, bytes) else each for each in values]
    return int(xxhash.xxh3_64_intdigest(repr(short).encode())) & _MASK

"""Checksums of the rows of a ledger, against damage that SQLite does not detect.

SQLite checksums its write-ahead log but not its pages. So triggers keep, for every table, the sum
of a hash of each row, which is compared with the rows whenever a ledger is opened. `PRAGMA
integrity_check` detects damage that hides rows. The tables of `queues.storage.state_counts` have no
sum: they are filled anew whenever a ledger is opened for writing.
"""

import marshal
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from queues.errors import LedgerError

_FUNCTION = "headway_row_hash"
_MASK = 2**62 - 1
"""Sums are modulo 2^62, so that sum + hash − hash never leaves SQLite's integers."""
_MARSHAL = 2
"""Version of Python's marshal format, the last in which equal rows are always equal bytes."""
_SUMS = """
CREATE TABLE checksums (
    name TEXT PRIMARY KEY,                  -- of a table
    columns TEXT NOT NULL,                  -- hashed columns
    value INTEGER NOT NULL                  -- the sum over its rows
) STRICT, WITHOUT ROWID
"""


def register(database: sqlite3.Connection) -> None:
    """Give a connection, which is going to write, the function that the triggers call."""
    database.create_function(_FUNCTION, -1, _hash, deterministic=True)
    # Otherwise a row that INSERT OR REPLACE replaces would stay in the sum.
    database.execute("PRAGMA recursive_triggers = ON")


def protect(database: sqlite3.Connection) -> None:
    """Sum the rows of all tables, which are new and empty, from now on."""
    rows = database.execute("SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY name")
    tables = [name for (name,) in rows if not name.startswith("sqlite_")]
    database.execute(_SUMS)
    for table in tables:
        rows = database.execute("SELECT name FROM pragma_table_info(?) ORDER BY cid", (table,))
        columns = " ".join(name for (name,) in rows)
        for trigger in _triggers(table, columns).values():
            database.execute(trigger)
        database.execute("INSERT INTO checksums VALUES (?, ?, 0)", (table, columns))


def check(database: sqlite3.Connection, path: Path) -> None:
    """Read every row, and raise LedgerError if the ledger is damaged.

    It takes about 2 µs a row, and a group has three; SQLite's own check goes on meanwhile.
    """
    with ThreadPoolExecutor(1) as other_thread:
        integrity = other_thread.submit(_integrity, path)
        _check_sums(database, path)
        if (answer := integrity.result()) != "ok":
            raise LedgerError(f"{path}: damaged: {answer}")


def _integrity(path: Path) -> str:
    try:
        database = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
        try:
            return str(database.execute("PRAGMA integrity_check(1)").fetchone()[0])
        finally:
            database.close()
    except (sqlite3.Error, UnicodeDecodeError) as error:
        return str(error)


def _check_sums(database: sqlite3.Connection, path: Path) -> None:
    try:
        schema: dict[str, str] = dict(database.execute("SELECT name, sql FROM sqlite_schema"))
        sums = database.execute("SELECT name, columns, value FROM checksums").fetchall()
        for table, columns, value in sums:
            intact = all(schema.get(name) == sql for name, sql in _triggers(table, columns).items())
            if not intact or _sum(database, table, columns) != value:
                raise LedgerError(f"{path}: damaged: the rows of {table!r} are not those written")
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise LedgerError(f"{path}: damaged: {error}") from error


_CHANGES = {"insert": "+ {new}", "update": "+ {new} - {old}", "delete": "- {old}"}


def _triggers(table: str, columns: str) -> dict[str, str]:
    """Return name and SQL of the triggers of a table, exactly as SQLite keeps them."""
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


def _sum(database: sqlite3.Connection, table: str, columns: str) -> int:
    cursor = database.cursor()
    cursor.row_factory = None  # tuples, as `_hash` is given
    cursor.execute(f"SELECT {', '.join(columns.split())} FROM {table}")
    digest, dumps, total = xxhash.xxh3_64_intdigest, marshal.dumps, 0
    for row in cursor:  # as `_hash`, whose call would take as long again
        total += digest(dumps(row, _MARSHAL)) & _MASK
    return total & _MASK


def _hash(*values: Any) -> int:
    return xxhash.xxh3_64_intdigest(marshal.dumps(values, _MARSHAL)) & _MASK

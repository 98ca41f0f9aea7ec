"""The ledger of a run, opened for reading, and the test for a living broker.

The run may be running. Every function of `queues.readers` that takes a run's folder raises
InputError if it holds no run, and LedgerError if its ledger cannot be read.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headway.errors import InputError
from headway.file_lock import is_held
from queues.errors import LedgerError
from queues.storage.ledger_schema import FILE_NAME, LOCK_NAME, check_schema_version
from queues.storage.row_checksums import check


def is_open(run_directory: Path) -> bool:
    """Return True if a living broker holds the run; False if there is no broker or no folder."""
    path = run_directory / LOCK_NAME
    try:
        return is_held(path)
    except OSError as error:
        raise LedgerError(f"{path}: cannot be tried: {error}") from error


_verified: dict[Path, tuple[Any, ...]] = {}
"""The files of the ledgers that this process has verified, as `_files` describes them."""


def _files(path: Path) -> tuple[Any, ...]:
    """Return what differs after any write to a ledger."""
    files = [path, path.with_name(f"{path.name}-wal")]
    states = [file.stat() for file in files if file.exists()]
    return tuple(
        (file.st_ino, file.st_size, file.st_mtime_ns, file.st_ctime_ns)
        for file in states
        if file.st_size  # readers create and delete empty -wal files
    )


@contextmanager
def open_ledger(run_directory: Path, *, verify: bool = True) -> Iterator[sqlite3.Connection]:
    """Open a ledger read-only, as it is at one moment.

    `verify` compares the rows with their checksums first (`queues.storage.row_checksums`), unless
    this process did so since the files changed last.
    """
    path = run_directory / FILE_NAME
    if not path.is_file():
        raise InputError(f"{run_directory}: no {FILE_NAME} here, so it is not the folder of a run")
    try:
        database = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
        try:
            check_schema_version(database, path)
            database.execute("BEGIN")
            if verify and _verified.get(path) != (files := _files(path)):
                check(database, path)
                _verified[path] = files
            yield database
        finally:
            database.close()
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise LedgerError(f"{path}: cannot be read: {error}") from error

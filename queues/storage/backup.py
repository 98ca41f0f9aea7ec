"""A copy of a run's ledger and journal on shared storage, for the loss of the broker's disk.

    ledger ─changes─▶ copy of the ledger    takes, acknowledgements, checkpoints: before the answer
    journal ─frames─▶ copy of the journal   always before the rows that refer to them

All else follows within some seconds. The copy is a whole run at every moment, and a broker begins
it with a copy of all that there is. `current.json` names the broker whose copy counts, so that one
on a node which was thought lost refuses to go on once another has taken the run over.
"""

import errno
import json
import logging
import os
import re
import secrets
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from queues.errors import LedgerError
from queues.runtime.atomic_file import atomic_file, sync_path
from queues.storage.journal import segments
from queues.storage.ledger_schema import FILE_NAME, JOURNAL_NAME, sessions_of
from queues.storage.row_checksums import register

log = logging.getLogger(__name__)
CURRENT = "current.json"
"""Names the newest ledger of a backup, the number of its sessions, and the checkpoints."""
_CHANGE = re.compile(r"INSERT|UPDATE|DELETE")
_URGENT = re.compile(r"(INSERT (OR REPLACE )?INTO|UPDATE) (batches|checkpoints)\b")
"""Takes, acknowledgements and checkpoints."""
_VERSION_BYTES = 18
"""Offset of the two bytes of an SQLite file that say by 2 that it has a write-ahead log."""
Change = tuple[str, Sequence[Any]]
"""A statement, and the values of each of its executions."""


class ChangesConnection(sqlite3.Connection):
    """A connection that hands on the changes of every transaction once it is committed."""

    committed: Callable[[list[Change]], None] | None = None
    """Called with the changes; None while nobody wants them."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._changes: list[Change] = []

    def execute(self, sql: str, values: Any = (), /) -> sqlite3.Cursor:
        """Execute a statement, and keep it if it is a change."""
        cursor = super().execute(sql, values)
        self._keep(sql, [values])
        return cursor

    def executemany(self, sql: str, values: Iterable[Any], /) -> sqlite3.Cursor:
        """Execute a statement with each of the values, and keep it."""
        rows = [*values]
        cursor = super().executemany(sql, rows)
        self._keep(sql, rows)
        return cursor

    def _keep(self, sql: str, values: Sequence[Any]) -> None:
        if self.committed is None:
            return
        if _CHANGE.match(sql):
            self._changes.append((sql, values))
        elif sql.startswith("BEGIN"):  # SQLite may have taken back the one before by itself
            self._changes = []
        elif sql == "COMMIT":
            self.committed(self._changes)


class Backup:
    """Keeps the copy up to date until `close`; made when nothing writes to the run yet.

    Args:
        run: The run's folder.
        folder: That of the copy, which exists.
        database: The run's ledger, whose changes are copied from now on.
        seconds: Time within which every change is in the copy.

    Raises:
        LedgerError: The copy cannot be written, or is of a later session than the run's folder.
    """

    def __init__(
        self, run: Path, folder: Path, database: ChangesConnection, *, seconds: float
    ) -> None:
        self._run, self._folder = run, folder
        self._name = f"ledger-{secrets.token_hex(4)}.sqlite"
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._failure: str | None = None
        self._try(lambda: self._begin(database))
        database.committed = self._add
        self._thread = threading.Thread(
            target=self._follow, args=(seconds / 2,), name="backup", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Bring the copy up to date for the last time."""
        self._closing.set()
        self._thread.join()
        try:
            self._try(self._flush)
        except LedgerError as error:
            log.warning("the last changes are not in the backup: %s", error)
        self._copy.close()

    def _begin(self, database: ChangesConnection) -> None:
        """Copy all that there is, and then declare this copy the newest."""
        (self._folder / JOURNAL_NAME).mkdir(exist_ok=True)
        self._copy_journal()
        file = self._folder / self._name
        copy = sqlite3.connect(file)
        database.backup(copy)
        copy.close()
        with file.open("r+b") as opened:  # shared storage cannot have a write-ahead log
            opened.seek(_VERSION_BYTES)
            opened.write(b"\x01\x01")
            os.fsync(opened.fileno())
        # One process writes this file, whatever locks the shared storage has.
        self._copy = sqlite3.connect(
            f"{file.absolute().as_uri()}?nolock=1",
            uri=True,
            isolation_level=None,
            check_same_thread=False,
        )
        self._copy.execute("PRAGMA journal_mode = TRUNCATE")
        self._copy.execute("PRAGMA synchronous = FULL")
        register(self._copy)
        self._copy.execute("BEGIN IMMEDIATE")
        content = {
            "ledger": self._name,
            "sessions": len(sessions_of(database)),
            "checkpoints": str((self._run / "checkpoints").resolve()),
        }
        with atomic_file(self._folder / CURRENT, durable=True) as opened:
            opened.write(json.dumps(content).encode())
        for other in self._folder.glob("ledger-*"):
            if not other.name.startswith(self._name):
                other.unlink(missing_ok=True)

    def _add(self, changes: list[Change]) -> None:
        """Add the changes of a transaction; urgent changes are durable when this returns."""

        def apply() -> None:
            for sql, values in changes:
                self._copy.executemany(sql, values)

        self._try(apply)
        if any(_URGENT.match(sql) for sql, _ in changes):
            self._try(self._flush)

    def _flush(self) -> None:
        """Make all changes so far durable, and what they refer to."""
        if superseded := self._superseded():
            raise LedgerError(superseded)
        unneeded = self._copy_journal()
        self._copy.execute("COMMIT")
        self._copy.execute("BEGIN IMMEDIATE")
        for path in unneeded:
            path.unlink(missing_ok=True)

    def _superseded(self) -> str | None:
        """Return that another broker has taken the run over, or None."""
        if read_current(self._folder)["ledger"] == self._name:
            return None
        return f"another broker goes on with this run, from {self._folder}"

    def _copy_journal(self) -> list[Path]:
        """Append what the segments have got since; return those that the run has no more."""
        source, target = self._run / JOURNAL_NAME, self._folder / JOURNAL_NAME
        existing = segments(source)
        for path in (source / f"{number:08d}.segment" for number in existing):
            copy, size = target / path.name, path.stat().st_size
            copied = copy.stat().st_size if copy.exists() else -1
            if copied == size:
                continue
            with path.open("rb") as read, copy.open("ab") as write:
                if copied > size:  # frames that were taken back
                    write.truncate(0)
                read.seek(max(0, copied) if copied < size else 0)
                shutil.copyfileobj(read, write)
                write.flush()
                os.fsync(write.fileno())
        sync_path(target)
        return [target / f"{x:08d}.segment" for x in segments(target) if x not in existing]

    def _follow(self, pause: float) -> None:
        """Bring the copy up to date at intervals; the next change raises what fails here."""
        while not self._closing.wait(pause):
            try:
                self._try(self._flush)
            except LedgerError:
                return

    def _try(self, work: Callable[[], None]) -> None:
        """Call `work`, one call at a time; after an error nothing more is done.

        The changes are in the ledger already: the error must not be taken for that of a full disk,
        after which they would be made once more.
        """
        with self._lock:
            if self._failure is None:
                try:
                    work()
                except LedgerError as error:
                    self._failure = str(error)
                except (OSError, sqlite3.Error) as error:
                    code = getattr(error, "sqlite_errorname", None)
                    code = code or errno.errorcode.get(getattr(error, "errno", None) or 0, "")
                    kind = f"{type(error).__name__} {code}".strip()
                    self._failure = f"the backup in {self._folder} cannot be written: {kind}"
                    with suppress(LedgerError):
                        self._failure = self._superseded() or self._failure
        if self._failure is not None:
            raise LedgerError(self._failure)


def check_backup(run: Path, folder: Path, database: sqlite3.Connection) -> None:
    """Raise LedgerError if a backup is of a later session than the ledger of the run's folder."""
    if (folder / CURRENT).exists() and (
        read_current(folder)["sessions"] > len(sessions_of(database))
    ):
        raise LedgerError(
            f"{run} is older than its backup, from which the run went on elsewhere: delete it, and"
            f" go on with `headway resume {folder}`"
        )


def read_current(folder: Path) -> dict[str, Any]:
    """Return the content of CURRENT; LedgerError if there is none."""
    try:
        content: dict[str, Any] = json.loads((folder / CURRENT).read_bytes())
    except (OSError, ValueError) as error:
        raise LedgerError(f"{folder} is not the backup of a run: {error}") from error
    return content


def restore(folder: Path, run: Path) -> Path:
    """Make ledger and journal of a run anew from a backup; return the path of its checkpoints."""
    current = read_current(folder)
    try:
        shutil.copytree(folder / JOURNAL_NAME, run / JOURNAL_NAME)
        for end in ("-journal", ""):  # with its journal SQLite takes back what was half written
            if (file := folder / f"{current['ledger']}{end}").exists():
                shutil.copyfile(file, run / f"{FILE_NAME}{end}")
    except OSError as error:
        raise LedgerError(f"{folder} cannot be copied to {run}: {error}") from error
    return Path(current["checkpoints"])

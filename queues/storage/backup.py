"""A copy of a run's ledger and journal on shared storage, for the loss of the broker's disk.

    ledger ─changes─▶ copy of the ledger    takes, acknowledgements, checkpoints: before the answer
    journal ─frames─▶ copy of the journal   always before the rows that refer to them

All else follows within some seconds. The copy is a whole run at every moment, and a broker begins
it with a copy of all that there is. `current.json` names the broker whose copy counts, and the
folder that the run goes on in, so that a broker on a node which was thought lost answers no more
once another has taken the run over, and its folder is refused.
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
from contextlib import closing
from pathlib import Path
from typing import Any

from headway.atomic_file import atomic_file, sync_path
from queues.errors import LedgerError
from queues.storage.journal import segment_path, segments
from queues.storage.ledger_schema import FILE_NAME, JOURNAL_NAME
from queues.storage.pause import Pause
from queues.storage.row_checksums import register

log = logging.getLogger(__name__)
CURRENT = "current.json"
"""Names the newest ledger of a backup, the run, its checkpoints, and who has taken it over last."""
CLAIM = "backup.claim"
"""File of a run that was made anew from its backup: what CURRENT says of who has taken it over."""
_CHANGE = re.compile(r"INSERT|UPDATE|DELETE")
_VERSION_BYTES = 18
"""Offset of the two bytes of an SQLite file that say by 2 that it has a write-ahead log."""
Change = tuple[str, Sequence[Any]]
"""A statement, and the values of each of its executions."""


class ChangesConnection(sqlite3.Connection):
    """A connection that hands on the changes of every transaction once it is committed."""

    committed: Callable[[list[Change], bool], None] | None = None
    """Called with the changes, and True if any is urgent; None while nobody wants them."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._changes: list[Change] = []
        self._urgent = False

    def execute(self, sql: str, values: Any = (), /, *, urgent: bool = False) -> sqlite3.Cursor:
        """Execute a statement; keep a change, which is in the backup at the commit if `urgent`."""
        cursor = super().execute(sql, values)
        self._keep(sql, [values])
        self._urgent |= urgent
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
            self._changes, self._urgent = [], False
        elif sql == "COMMIT":
            self.committed(self._changes, self._urgent)


class Backup:
    """Keeps the copy up to date until `close`; made when nothing writes to the run yet.

    Args:
        run: The run's folder.
        folder: The folder of the copy, which exists.
        database: The run's ledger, whose changes are copied from now on.
        seconds: Time within which every change is in the copy.
        probe_seconds: Interval between probes of full storage.

    Raises:
        LedgerError: The copy cannot be written.
    """

    def __init__(
        self,
        run: Path,
        folder: Path,
        database: ChangesConnection,
        *,
        seconds: float,
        probe_seconds: float,
    ) -> None:
        self._run, self._folder = run, folder
        self._name = f"ledger-{secrets.token_hex(4)}.sqlite"
        self._changes: list[Change] = []
        """Changes that are not in the copy yet."""
        self._lock = threading.Lock()
        self.closing = threading.Event()
        """Set when nothing waits for space any more."""
        self._failure: str | None = None
        self.pause = Pause(f"the backup in {folder}", folder, probe_seconds)
        self._try(lambda: self._begin(database))
        database.committed = self._add
        self._thread = threading.Thread(
            target=self._follow, args=(seconds / 2,), name="backup", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Bring the copy up to date for the last time."""
        self.closing.set()
        self._thread.join()
        try:
            self._try(self._flush)
        except LedgerError as error:
            log.warning("the last changes are not in the backup: %s", error)
        self._copy.close()

    def _begin(self, database: ChangesConnection) -> None:
        """Copy all that there is, and then declare this copy the newest."""
        journal = self._folder / JOURNAL_NAME
        journal.mkdir(exist_ok=True)
        self._newest = 0
        self._copied = {x: segment_path(journal, x).stat().st_size for x in segments(journal)}
        """Bytes of each segment in the copy; those before the newest are complete."""
        unneeded = self._copy_journal()
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
        self._current = {
            "ledger": self._name,
            "name": self._run.name,
            "checkpoints": str((self._run / "checkpoints").resolve()),
            "claim": _claim_of(self._run),
        }
        check_backup(self._run, self._folder)  # copying took time
        _write_current(self._folder, self._current)
        self._remove(unneeded)  # also what another broker has appended since this run was restored
        for other in self._folder.glob("ledger-*"):
            if not other.name.startswith(self._name):
                other.unlink(missing_ok=True)

    def _add(self, changes: list[Change], urgent: bool) -> None:
        """Add the changes of a transaction; if any is urgent, all are durable when this returns.

        During a pause all changes wait, so that they do not grow without bound.
        """
        self._changes += changes
        if urgent or self.pause.reason:
            self._try(self._flush)
        elif self._failure is not None:
            raise LedgerError(self._failure)

    def _flush(self) -> None:
        """Make all changes so far durable, and what they refer to."""
        self._check_current()
        changes = [*self._changes]  # before the journal is copied, which then has their groups
        unneeded = self._copy_journal()
        if self._copy.in_transaction:  # that of a try before
            self._copy.execute("ROLLBACK")
        self._copy.execute("BEGIN IMMEDIATE")
        for sql, values in changes:
            self._copy.executemany(sql, values)
        self._copy.execute("COMMIT")
        del self._changes[: len(changes)]
        self._remove(unneeded)
        self._check_current()  # another broker copies what was there before it took the run over

    def _check_current(self) -> None:
        """Raise LedgerError if another broker has taken the run over."""
        if read_current(self._folder) != self._current:
            raise LedgerError(f"another broker goes on with this run, from {self._folder}")

    def _copy_journal(self) -> list[int]:
        """Append what the segments have got since; return those that the run has no more."""
        source, target = self._run / JOURNAL_NAME, self._folder / JOURNAL_NAME
        existing = segments(source)
        for number in existing:
            copied = self._copied.get(number)
            if copied is not None and number < self._newest:
                continue
            try:
                read = segment_path(source, number).open("rb")
            except FileNotFoundError:  # removed meanwhile, since nothing refers to it
                continue
            with read:
                size = os.fstat(read.fileno()).st_size
                if copied != size:
                    if copied is None:  # it may be one of a broker that has taken the run over
                        check_backup(self._run, self._folder)
                    with segment_path(target, number).open("wb" if copied is None else "r+b") as to:
                        self._copied.setdefault(number, 0)
                        start = min(copied or 0, size)
                        to.truncate(start)  # frames may have been taken back
                        to.seek(start)
                        read.seek(start)
                        shutil.copyfileobj(read, to)
                        to.flush()
                        os.fsync(to.fileno())
                        if not copied:
                            sync_path(target)
                        self._copied[number] = to.tell()
        self._newest = max(existing, default=0)
        return [number for number in self._copied if number not in existing]

    def _remove(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            segment_path(self._folder / JOURNAL_NAME, number).unlink(missing_ok=True)
            del self._copied[number]

    def _follow(self, pause: float) -> None:
        """Bring the copy up to date at intervals; the next change raises what fails here."""
        while not self.closing.wait(pause):
            try:
                self._try(self._flush)
            except LedgerError:
                return

    def _try(self, work: Callable[[], None]) -> None:
        """Call `work`, one call at a time, again once full storage has space.

        After any other error nothing more is done. The changes are in the ledger already: the error
        must not be taken for that of a full disk, after which they would be made once more.
        """
        with self._lock, self.pause.writing():
            while self._failure is None:
                try:
                    work()
                    break
                except LedgerError as error:
                    self._failure = str(error)
                except (OSError, sqlite3.Error) as error:
                    if not self.pause.wait_for_space(error, self.closing):
                        code = getattr(error, "sqlite_errorname", None)
                        code = code or errno.errorcode.get(getattr(error, "errno", None) or 0, "")
                        kind = f"{type(error).__name__} {code}".strip()
                        self._failure = f"the backup in {self._folder} cannot be written: {kind}"
        if self._failure is not None:
            raise LedgerError(self._failure)


def check_backup(run: Path, folder: Path) -> None:
    """Raise LedgerError if a run went on elsewhere, from its backup."""
    if is_taken_over(run, folder):
        raise LedgerError(
            f"{run} is older than its backup, from which the run went on elsewhere: delete it, and"
            f" go on with `headway resume {folder}`"
        )


def is_taken_over(run: Path, folder: Path) -> bool:
    """Return True if a backup is that of another folder by now; LedgerError if it is damaged."""
    return (folder / CURRENT).exists() and read_current(folder)["claim"] != _claim_of(run)


def _claim_of(run: Path) -> str:
    """Return by what a run has taken its backup over; "" for the first folder of a run."""
    return (run / CLAIM).read_text() if (run / CLAIM).exists() else ""


def read_current(folder: Path) -> dict[str, str]:
    """Return the content of CURRENT; LedgerError if there is none, or it is damaged."""
    try:
        content = json.loads((folder / CURRENT).read_bytes())
        return {key: str(content[key]) for key in ("ledger", "name", "checkpoints", "claim")}
    except OSError as error:
        raise LedgerError(f"the backup in {folder} cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise LedgerError(f"{folder / CURRENT} is damaged: {error!r}") from error


def _write_current(folder: Path, content: dict[str, str]) -> None:
    with atomic_file(folder / CURRENT, durable=True) as file:
        file.write(json.dumps(content).encode())


def restore(folder: Path, run: Path) -> Path:
    """Take a backup over, and make ledger and journal of a run from it; return its checkpoints."""
    current = {**read_current(folder), "claim": secrets.token_hex(4)}
    file = run / FILE_NAME
    try:
        (run / CLAIM).write_text(current["claim"])
        _write_current(folder, current)  # from now on no other broker answers
        copy, before = folder / current["ledger"], 0
        # Another broker may still be writing; it stops at its next check.
        while (now := copy.stat().st_mtime_ns) != before:
            before = now
            shutil.copyfile(copy, file)
            if (undo := folder / f"{copy.name}-journal").exists():
                shutil.copyfile(undo, run / f"{FILE_NAME}-journal")
        shutil.copytree(folder / JOURNAL_NAME, run / JOURNAL_NAME)
        with closing(sqlite3.connect(file)) as database:  # takes back what was half written
            database.execute("SELECT count(*) FROM meta").fetchone()
    except (OSError, sqlite3.Error) as error:
        raise LedgerError(f"{folder} cannot be copied to {run}: {error}") from error
    return Path(current["checkpoints"])

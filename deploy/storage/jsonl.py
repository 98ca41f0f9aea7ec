"""Files of JSON lines: one record a line, and a last line without its end if a crash cut it off."""

import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

from headway.atomic_file import atomic_file
from headway.clean_text import without_secrets_in
from headway.full_disk import is_full

Say = Callable[[str], None]
"""Prints a line for the user."""
DAMAGED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""Errors of JSON that is damaged, and of making an object of what it has."""


class Rows(NamedTuple):
    """The content of a file of JSON lines."""

    intact: list[Any]
    """Records of the lines that are whole."""
    parsed: list[Any]
    """The objects that were made of them."""
    damaged: dict[int, str]
    """Line number, from 1, and what is wrong with it; a last line that was cut off is no damage."""
    lines: int
    """Number of all lines."""


def read_rows(path: Path, parse: Callable[[Any], Any] = lambda row: row) -> Rows:
    """Read a file of JSON lines, which need not exist; `parse` makes an object of each record."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    rows = Rows([], [], {}, len(lines))
    for number, line in enumerate(lines, start=1):
        try:
            if line.endswith(b"\n"):
                row = json.loads(line)
                rows.parsed.append(parse(row))
                rows.intact.append(row)
        except DAMAGED as error:
            rows.damaged[number] = brief(error)
    return rows


def append_rows(path: Path, rows: Iterable[Any]) -> None:
    """Append records, without secrets: all of them, or none if that fails."""
    before = path.stat().st_size if path.exists() else 0
    try:
        with path.open("a") as file:
            file.writelines(json.dumps(without_secrets_in(row)) + "\n" for row in rows)
    except OSError:
        with suppress(OSError):
            os.truncate(path, before)
        raise


def rewrite_rows(path: Path, rows: Iterable[Any]) -> None:
    """Replace all records of a file."""
    with atomic_file(path, durable=True) as file:
        file.writelines(json.dumps(row).encode() + b"\n" for row in rows)


def set_aside(path: Path) -> Path:
    """Rename a file or folder to `aside-NAME`, or `aside-2-NAME`, …; return its new path."""
    prefixes = chain(["aside-"], (f"aside-{number}-" for number in count(2)))
    targets = (path.with_name(prefix + path.name) for prefix in prefixes)
    return path.rename(next(target for target in targets if not target.exists()))


def mend_rows(path: Path, say: Say, parse: Callable[[Any], Any] = lambda row: row) -> list[Any]:
    """Return the records of a JSON-lines file, without those that are damaged, made by `parse`.

    The file then has the intact records alone; as it was, it is set aside.
    """
    try:
        rows = read_rows(path, parse)
    except OSError as error:
        say(f"{path} cannot be read ({error}), and is kept as {set_aside(path)}")
        return []
    if rows.damaged:
        say(
            f"{path}, line {next(iter(rows.damaged))} is damaged; {len(rows.intact)} intact records"
            f" of {rows.lines} stay, and the file as it was is kept as {set_aside(path)}"
        )
    if len(rows.intact) < rows.lines:
        rewrite_rows(path, rows.intact)
    return rows.parsed


def brief(error: Exception) -> str:
    """Return type and message of an error."""
    return f"{type(error).__name__}: {error}"


class JsonlWriter:
    """Appends records to the log files of a run, from any thread.

    Records are dropped while the disk is full, which `say` reports.
    """

    def __init__(self, folder: Path, say: Say) -> None:
        self._folder, self._say = folder, say
        self._dropped: Counter[str] = Counter()
        self._lock = threading.Lock()

    def write(self, name: str, records: Iterable[Any]) -> None:
        """Append records to a file: all of them, or none if the disk is full."""
        records = [*records]
        if not records:
            return
        with self._lock:
            try:
                append_rows(self._folder / name, records)
            except OSError as error:
                if not is_full(error, self._folder):
                    raise
                if not self._dropped[name]:
                    self._say(f"the disk is full: records of {name} are dropped until it is not")
                self._dropped[name] += len(records)
            else:
                if dropped := self._dropped.pop(name, 0):
                    self._say(f"{dropped} records of {name} were dropped while the disk was full")

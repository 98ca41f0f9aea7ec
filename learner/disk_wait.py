"""Waiting for disk space while a checkpoint is written.

The thread of a rank whose disk fills up waits where it is, reports why (`paused`), and then writes
the file again from its beginning. Training goes on until the next checkpoint is due.
"""

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from headway.full_disk import PROBE_BYTES, full_disk_message, has_space, is_full

log = logging.getLogger(__name__)
RETRY_SECONDS = 2.0
"""Interval between two probes of a full disk."""
_reasons: list[str] = []
"""The reason for which this process waits; empty or one entry."""


def paused() -> str | None:
    """Return why this process waits for space, or None; callable from any thread."""
    return next(iter(_reasons), None)


def wait_for_space(folder: Path, size: int) -> None:
    """Block until the disk of a folder has at least `size` bytes and PROBE_BYTES free."""
    size = max(size, PROBE_BYTES)
    if has_space(folder, size):
        return
    reason = f"{full_disk_message(folder)} (a checkpoint needs {size} bytes)"
    log.warning("paused: %s", reason)
    _reasons.append(reason)
    try:
        while not has_space(folder, size):
            time.sleep(RETRY_SECONDS)
    finally:
        _reasons.clear()
    log.warning("there is space again on the disk of %s", folder)


def write_whole(path: Path, write: Callable[[], object]) -> None:
    """Call `write`, and again for as long as it fails because the disk is full.

    A partial file is removed first, and at least as much space as it took is waited for. `path` is
    the file that `write` makes, or the folder whose own files it makes; it replaces what exists.
    Another error of `write` is raised.
    """
    _retry_when_full(path, write, remove=lambda: _remove(path))


def make_folder(folder: Path, *, exist_ok: bool = True) -> None:
    """Make a folder and those above it; waits while the disk is full."""
    make = partial(folder.mkdir, parents=True, exist_ok=exist_ok)
    _retry_when_full(folder, make, remove=lambda: 0)


def _retry_when_full(path: Path, write: Callable[[], object], *, remove: Callable[[], int]) -> None:
    """Call `write` until the disk is not full; `remove` returns the bytes that it removed."""
    folder = next(above for above in (path, *path.parents) if above.is_dir())
    while True:
        try:
            write()
        except Exception as error:
            if not is_full(error, folder):
                raise
            log.warning("no space was left for %s: %s", path, error)
            size = PROBE_BYTES + remove()
            time.sleep(RETRY_SECONDS)  # a quota may leave less than it seems
            wait_for_space(folder, size)
        else:
            return


def write_text(file: Path, text: str) -> None:
    """Write a text file; waits while the disk is full."""
    write_whole(file, lambda: file.write_text(text))


def _remove(path: Path) -> int:
    """Remove a file, or the files of a folder; return the bytes that they had."""
    files = [file for file in path.iterdir() if file.is_file()] if path.is_dir() else [path]
    size = sum(file.stat().st_size for file in files if file.exists())
    for file in files:
        file.unlink(missing_ok=True)
    return size

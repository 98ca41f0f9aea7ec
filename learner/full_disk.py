"""A disk that fills up while a checkpoint is written: who writes a file waits, and begins it anew.

Every rank waits where it is, and says so to whoever asks (`paused`); ranks which meet in a
collective operation meet later. After that operation's own deadline the run ends. Leaves out how
much room a checkpoint needs before it begins (`ray_lead`).
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from queues.runtime.disk_space import PROBE_BYTES, full_disk_message, has_space, is_full

log = logging.getLogger(__name__)
RETRY_SECONDS = 2.0
"""How often a full disk is asked for room."""
_reasons: list[str] = []
"""Why this process waits: none or one."""


def paused() -> str | None:
    """Why this process waits for room, if it does; to be asked from any thread."""
    return next(iter(_reasons), None)


def wait_for_room(folder: Path, size: int) -> None:
    """Returns once the disk of a folder has room for so many bytes, and at least PROBE_BYTES."""
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
    log.warning("there is room again on the disk of %s", folder)


def write_whole(path: Path, write: Callable[[], object]) -> None:
    """Calls `write`, again and again as long as the disk is full; other errors are raised.

    What was cut off is removed first, and at least as much room is waited for as it had taken. The
    error alone tells whether the disk was full: asked afterwards it may have room, since another
    rank has removed what it had written. torch does not say why it cannot write to a path, so it is
    to write to a file (`write_file`).

    Args:
        path: The file that `write` makes, or the folder whose own files it makes.
        write: Makes all of it, and replaces what is there.
    """
    folder = path if path.is_dir() else path.parent
    while True:
        try:
            write()
        except Exception as error:
            if not is_full(error, folder):
                raise
            log.warning("no space was left for %s: %s", path, error)
            room = PROBE_BYTES + _remove(path)
            time.sleep(RETRY_SECONDS)  # a quota may leave less than it seems
            wait_for_room(folder, room)
        else:
            return


def write_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """As `write_whole`, for what writes to an open file."""

    def whole() -> None:
        with path.open("wb") as file:
            write(file)

    write_whole(path, whole)


def _remove(path: Path) -> int:
    """Removes a file, or the files of a folder; the bytes that they had."""
    files = [each for each in path.iterdir() if each.is_file()] if path.is_dir() else [path]
    size = sum(file.stat().st_size for file in files if file.exists())
    for file in files:
        file.unlink(missing_ok=True)
    return size

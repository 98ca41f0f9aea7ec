"""Whether a disk is full, whatever the library that met it says.

Only the system's and SQLite's own errors tell; others, such as torch's, do not say why a write
failed, so the disk itself is asked.
"""

import errno
import os
import sqlite3
import tempfile
from pathlib import Path

PROBE_BYTES = 2**20
"""Room for less than this is no room: the next write of any size would fail again."""
_ERRNO = frozenset({errno.ENOSPC, errno.EDQUOT})


def is_full(error: BaseException | None, folder: Path) -> bool:
    """Whether an error, or one that it followed from, is that of a disk without room.

    Args:
        error: What was raised while writing.
        folder: Where to; asked only where the error leaves it open.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in _ERRNO:
            return True
        if isinstance(error, sqlite3.Error):
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code == sqlite3.SQLITE_FULL:
                return True
            if code == sqlite3.SQLITE_IOERR:  # of a quota, or of the -shm file
                return not has_room(folder)
        error = error.__cause__ or error.__context__
    return False


def has_room(folder: Path, size: int = PROBE_BYTES) -> bool:
    """Whether `size` bytes can be written into a folder now; they are gone again afterwards."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.write(bytes(size))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.errno not in _ERRNO  # what else is wrong, the next write will say
    return True


def no_room(folder: Path) -> str:
    """The reason for a pause, for people to read."""
    return f"no space is left on the disk of {folder}; free some, and this goes on by itself"

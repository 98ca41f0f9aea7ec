"""Whether a disk is full, whatever the library or the process that met it says.

The system and SQLite say so by a code; safetensors, and an error that came from another process,
by the system's words alone. Where SQLite's code leaves it open, the disk itself is asked.
"""

import errno
import os
import sqlite3
import tempfile
from pathlib import Path

PROBE_BYTES = 2**20
"""Room for less than this is no room: the next write of any size would fail again."""
_ERRNO = frozenset({errno.ENOSPC, errno.EDQUOT})
_WORDS = (*(os.strerror(number) for number in sorted(_ERRNO)), "database or disk is full")


def is_full(error: BaseException | None, folder: Path) -> bool:
    """Whether an error, or one that it followed from, is that of a disk without room.

    Args:
        error: What was raised while writing, in this process or another.
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
        if any(words in str(error) for words in _WORDS):
            return True
        error = error.__cause__ or error.__context__
    return False


def has_room(folder: Path, size: int = PROBE_BYTES) -> bool:
    """Whether `size` bytes are free for files of a folder now, and some can really be written.

    At most PROBE_BYTES are written, and gone again afterwards: a quota shows in nothing else, and
    more would take the room from those who need it. So a quota may leave less than `size`.
    """
    try:
        disk = os.statvfs(folder)
        if disk.f_blocks and disk.f_bavail * disk.f_frsize < size:  # no blocks: it does not tell
            return False
        with tempfile.TemporaryFile(dir=folder) as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, min(size, PROBE_BYTES))
            else:
                file.write(bytes(min(size, PROBE_BYTES)))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.errno not in _ERRNO  # what else is wrong, the next write will say
    return True


def no_room(folder: Path) -> str:
    """The reason for a pause, for people to read."""
    return f"no space is left on the disk of {folder}; free some, and this goes on by itself"

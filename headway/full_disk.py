"""Detection of a full disk from errors of any library and of other processes.

The operating system and SQLite report a full disk by an error code, other sources only by the
operating system's message. Where SQLite's code is ambiguous, the disk itself is probed.
"""

import errno
import os
import sqlite3
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

PROBE_BYTES = 2**20
"""A disk with less free space than this counts as full."""
START_BYTES = 2**24
"""Free space with which a process that is started again may begin: it writes logs first."""
SPACE_SECONDS = 1.0
"""Interval between two probes of a full disk."""
_ERRNO = frozenset({errno.ENOSPC, errno.EDQUOT})
_MESSAGES = (*(os.strerror(number) for number in sorted(_ERRNO)), "database or disk is full")


def is_full(error: BaseException | None, folder: Path) -> bool:
    """Return True if an error, or one that it followed from, was caused by `folder`'s full disk."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _ERRNO:
            return True
        if isinstance(error, sqlite3.Error):
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code == sqlite3.SQLITE_FULL:
                return True
            if code == sqlite3.SQLITE_IOERR:  # a quota, or the -shm file
                return not has_space(folder)
        if any(message in str(error) for message in _MESSAGES):
            return True
        error = error.__cause__ or error.__context__
    return False


def has_space(folder: Path, size: int = PROBE_BYTES) -> bool:
    """Return True if `size` bytes are free on the disk of a folder and a probe can be written.

    The probe shows a quota; it takes at most PROBE_BYTES, so as not to take space from others.
    """
    try:
        disk = os.statvfs(folder)
        if disk.f_blocks and disk.f_bavail * disk.f_frsize < size:  # no blocks: not reported
            return False
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, min(size, PROBE_BYTES))
            os.fsync(file.fileno())
    except OSError as error:
        return error.errno not in _ERRNO  # the next write raises any other error again
    return True


def why_unwritable(folder: Path) -> str | None:
    """Return the system's reason for taking no file in a folder, such as "Read-only file system".

    None if it takes one.
    """
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return error.strerror
    return None


def wait_for_space(folder: Path, say: Callable[[str], None]) -> None:
    """Block until the disk of a folder has START_BYTES free, and say why and when."""
    if has_space(folder, START_BYTES):
        return
    say(f"paused: {full_disk_message(folder)} (at {START_BYTES:,} bytes)")
    while not has_space(folder, START_BYTES):
        time.sleep(SPACE_SECONDS)
    say(f"there is space again on the disk of {folder}")


def full_disk_message(folder: Path) -> str:
    """Return the reason for a pause, for people to read."""
    return f"no space is left on the disk of {folder}; free some, and this goes on by itself"

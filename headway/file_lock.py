"""Locks of files between processes; a lock ends with the process that holds it.

A lock is that of a file (`flock`), not of its name: whoever has waited for it compares the two.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

TEST_SECONDS = 0.25
"""Longer than a command holds a lock that it only tests."""
RETRY_SECONDS = 0.01
MAKE = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
"""Flags of a file that is made: no link leads to a file elsewhere, which would be overwritten."""


def take(descriptor: int, *, shared: bool = False, seconds: float = TEST_SECONDS) -> None:
    """Lock an open file, for as long as it is open.

    Raises:
        BlockingIOError: Others have held it for `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(RETRY_SECONDS)
        else:
            return


def is_held(path: Path) -> bool:
    """Return True if a process holds the exclusive lock of a file, which need not exist."""
    with suppress(FileNotFoundError, NotADirectoryError), path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@contextmanager
def locked(
    path: Path,
    *,
    shared: bool = False,
    passing: bool = False,
    parents: bool = False,
    seconds: float = TEST_SECONDS,
) -> Iterator[int]:
    """Hold the lock of a file, which is made if missing, and yield its descriptor.

    A `shared` lock others may hold too; its file must exist, and is only read. A `passing` one
    removes the file at the end of the block. `parents` makes its folder, if missing.

    Raises:
        BlockingIOError: Others have held it for `seconds`.
        OSError: The file can be neither opened nor made.
    """
    while True:
        try:
            descriptor = os.open(path, os.O_RDONLY if shared else MAKE, 0o666)
        except FileNotFoundError:
            if not parents:
                raise
            with suppress(FileNotFoundError):  # another command removes its parent
                path.parent.mkdir(parents=True, exist_ok=True)
            continue
        try:
            take(descriptor, shared=shared, seconds=seconds)
            if not is_at(descriptor, path):
                continue  # it was removed or replaced meanwhile
            try:
                yield descriptor
            finally:
                if passing and is_at(descriptor, path):
                    path.unlink()
            return
        finally:
            os.close(descriptor)


def is_at(descriptor: int, path: Path) -> bool:
    """Return True if an open file is the one at a path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False

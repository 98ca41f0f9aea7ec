"""A folder that appears as a whole, or not at all, whoever is interrupted when."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deploy.errors import InputError
from deploy.runtime.signals import deferred


def check_place(folder: Path, *, replace: bool) -> None:
    """Refuses a place that is taken, unless what is there may be replaced.

    Raises:
        InputError: It exists.
    """
    if folder.exists() and not replace:
        raise InputError(f"{folder} exists; choose another name, or delete it with --replace")


@contextmanager
def made_whole(folder: Path, *, replace: bool) -> Iterator[Path]:
    """A folder to write into, which takes the place of `folder` at the end of the block.

    Nothing of it is left when the block raises.

    Raises:
        InputError: Another command is making the same, or has made it and it may not be replaced.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(partial, os.O_RDONLY)
    try:
        _lock(descriptor, partial, folder)
        try:
            check_place(folder, replace=replace)  # another command may have made it meanwhile
            for leftover in partial.iterdir():
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
            yield partial
            _swap(partial, folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    finally:
        os.close(descriptor)


def _lock(descriptor: int, partial: Path, folder: Path) -> None:
    """Takes the lock of a folder that is still where it was opened."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        mine = partial.exists() and partial.stat().st_ino == os.fstat(descriptor).st_ino
    except BlockingIOError:
        mine = False
    if not mine:
        raise InputError(
            f"another command is making {folder}; wait for its end, or choose another name"
        )


def _swap(partial: Path, folder: Path) -> None:
    """Puts the finished folder in its place; the one that was there is deleted last."""
    old = folder.with_name(f".{folder.name}.old")
    with deferred():
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
        shutil.rmtree(old, ignore_errors=True)

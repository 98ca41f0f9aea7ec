"""Creates a folder atomically: it is written to a temporary sibling, which is then renamed."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deploy.errors import InputError
from deploy.runtime.signals import deferred
from queues.runtime.atomic_file import sync_path, sync_tree


def check_absent(folder: Path, *, replace: bool) -> None:
    """Refuse a folder that exists, unless it may be replaced.

    Raises:
        InputError: The folder exists.
    """
    if folder.exists() and not replace:
        raise InputError(f"{folder} exists; choose another name, or delete it with --replace")


@contextmanager
def atomic_folder(folder: Path, *, replace: bool) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `folder` at the end of the block.

    The temporary folder is deleted if the block raises. What it has is synced before it is renamed.

    Raises:
        InputError: Another command is making `folder`, or it exists and may not be replaced.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(partial, os.O_RDONLY)
    try:
        _lock(descriptor, partial, folder)
        try:
            check_absent(folder, replace=replace)  # by another command
            for leftover in partial.iterdir():
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
            yield partial
            sync_tree(partial)
            old = folder.with_name(f".{folder.name}.old")
            with deferred():
                shutil.rmtree(old, ignore_errors=True)
                if folder.exists():
                    folder.rename(old)
                partial.rename(folder)
                sync_path(folder.parent)
                shutil.rmtree(old, ignore_errors=True)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    finally:
        os.close(descriptor)


def _lock(descriptor: int, partial: Path, folder: Path) -> None:
    """Lock the open folder, which must still be at `partial`."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        locked = partial.exists() and partial.stat().st_ino == os.fstat(descriptor).st_ino
    except BlockingIOError:
        locked = False
    if not locked:
        raise InputError(
            f"another command is making {folder}; wait for its end, or choose another name"
        )

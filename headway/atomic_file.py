"""Atomic replacement of one file: write to a temporary sibling, then rename. Durable writes."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from headway.file_lock import locked

WRITE_SECONDS = 5.0
"""Longer than a command takes to write a file that another may write too."""


@contextmanager
def atomic_file(path: Path, *, durable: bool = False) -> Iterator[BinaryIO]:
    """Open a file for writing that takes the place of `path` when the block ends.

    If the block raises, `path` stays as it was and the temporary file `.NAME.partial` is removed.
    `durable` syncs the file and its folder, so that the result survives the loss of power.

    Raises:
        BlockingIOError: Another process has been writing it for `WRITE_SECONDS`.
    """
    temporary = path.with_name(f".{path.name}.partial")
    with ExitStack() as hold:
        try:
            descriptor = hold.enter_context(locked(temporary, passing=True, seconds=WRITE_SECONDS))
        except BlockingIOError as error:
            raise BlockingIOError(error.errno, "another process is writing it", str(path)) from None
        with open(descriptor, "wb", closefd=False) as file:
            file.truncate()  # what a killed process left
            yield file
            file.flush()
            if durable:
                os.fsync(descriptor)
        temporary.replace(path)
    if durable:
        sync_path(path.parent)


def sync_path(path: Path) -> None:
    """Make the content of a file durable, or the creation and renaming of files in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Make a folder and everything in it durable, but for names that begin with a dot."""
    for path in [*folder.rglob("[!.]*"), folder]:
        sync_path(path)

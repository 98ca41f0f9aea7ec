"""Atomic replacement of one file: write to a temporary sibling, then rename. Durable writes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_file(path: Path, *, durable: bool = False) -> Iterator[BinaryIO]:
    """Open a file for writing that takes the place of `path` when the block ends.

    If the block raises, `path` stays as it was and the temporary file `.NAME.partial` is removed.
    `durable` syncs the file and its folder, so that the result survives the loss of power.
    """
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
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

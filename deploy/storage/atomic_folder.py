"""Creates a folder atomically: it is written to a temporary sibling, which is then renamed.

Functions raise InputError for a folder that exists, is made or is in use by another command.
"""

import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from deploy.runtime.signals import deferred
from headway.atomic_file import sync_path, sync_tree
from headway.errors import InputError
from headway.file_lock import is_held, locked

ORIGIN_FILE = "origin.json"
"""File in the folder of a warm start or of reward models with the settings of its making; who uses
the folder holds its lock."""
UNFINISHED = "unfinished"
"""Folder, beside the model of a stage, of its checkpoints `v…` if it was interrupted."""


def check_absent(folder: Path, *, replace: bool) -> None:
    """Refuse a folder that exists, unless it may be replaced."""
    if folder.exists() and not replace:
        raise InputError(f"{folder} exists; choose another name, or delete it with --replace")


@contextmanager
def atomic_folder(folder: Path, *, replace: bool, private: bool = False) -> Iterator[Path]:
    """Yield a temporary folder that is synced and renamed to `folder` at the end of the block.

    It is deleted if the block raises. Only this user may read a `private` one.
    """
    partial, old = (folder.with_name(f".{folder.name}.{state}") for state in ("partial", "old"))
    with making(folder, replace=replace):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(mode=0o700 if private else 0o777)
        try:
            yield partial
            sync_tree(partial)
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


@contextmanager
def making(folder: Path, *, replace: bool) -> Iterator[None]:
    """Keep other commands from making or using a folder during the block."""
    with ExitStack() as hold:
        problem = f"another command is making {folder}"
        try:
            hold.enter_context(locked(_lock(folder), passing=True, parents=True))
            check_absent(folder, replace=replace)
            if (folder / ORIGIN_FILE).exists():
                problem = f"{folder} is in use by another command"
                hold.enter_context(locked(folder / ORIGIN_FILE))
        except BlockingIOError:
            raise InputError(f"{problem}; wait for its end, or choose another name") from None
        yield


@contextmanager
def in_use(folders: Iterable[Path]) -> Iterator[None]:
    """Keep other commands from replacing folders during the block; there may be none."""
    with ExitStack() as hold:
        for folder in folders:
            try:
                hold.enter_context(locked(folder / ORIGIN_FILE, shared=True))
            except BlockingIOError:
                raise InputError(
                    f"another command is replacing {folder}; wait for its end"
                ) from None
            except (FileNotFoundError, NotADirectoryError):
                if is_held(_lock(folder)):
                    raise InputError(f"another command is making {folder}") from None
        yield


def _lock(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock")

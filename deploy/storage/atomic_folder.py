"""Creates a folder atomically: it is written to a temporary sibling, which is then renamed."""

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


def check_absent(folder: Path, *, replace: bool) -> None:
    """Refuse a folder that exists, unless it may be replaced.

    Raises:
        InputError: The folder exists.
    """
    if folder.exists() and not replace:
        raise InputError(f"{folder} exists; choose another name, or delete it with --replace")


@contextmanager
def atomic_folder(folder: Path, *, replace: bool, private: bool = False) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `folder` at the end of the block.

    The temporary folder is deleted if the block raises. What it has is synced before it is renamed.
    Only this user may read a `private` one.

    Raises:
        InputError: Another command is making `folder`, or it exists and may not be replaced, or
            is in use.
    """
    partial, old = (folder.with_name(f".{folder.name}.{state}") for state in ("partial", "old"))
    with ExitStack() as hold:
        try:
            hold.enter_context(locked(_lock(folder), passing=True, parents=True))
        except BlockingIOError:
            raise InputError(
                f"another command is making {folder}; wait for its end, or choose another name"
            ) from None
        check_absent(folder, replace=replace)
        if (folder / ORIGIN_FILE).exists():
            try:
                hold.enter_context(locked(folder / ORIGIN_FILE))
            except BlockingIOError:
                raise InputError(
                    f"{folder} is in use by another command; wait for its end, or choose another "
                    "name"
                ) from None
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
def in_use(folders: Iterable[Path]) -> Iterator[None]:
    """Keep other commands from replacing folders during the block; there may be none.

    Raises:
        InputError: Another command is making or replacing one of them.
    """
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

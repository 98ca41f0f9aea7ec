"""The backup of a run: a folder made anew from it, and errors that name it."""

import glob
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deploy.config.run_config import RunConfig
from deploy.storage.jsonl import Say
from deploy.storage.run_directory import RunDirectory
from deploy.storage.sessions import last_recipe
from headway.errors import InputError
from queues.errors import JournalError, LedgerError
from queues.storage.backup import CURRENT, check_backup, read_current, restore


def find_begun_run(config: RunConfig) -> Path | None:
    """Return the folder of a recipe's run, else its only backup; None if there is neither."""
    directory, backups = RunDirectory.of(config), config.deploy.backup_dir
    if directory.recipe_file.exists() or directory.ledger.exists():
        return directory.path
    if backups is None:
        return None
    named = f"{glob.escape(config.name)}-{'[0-9a-f]' * 8}/{CURRENT}"
    kept = sorted(path.parent for path in backups.glob(named))
    if len(kept) > 1:
        raise InputError(
            f"{directory.path} is not there, and there are backups of several runs named "
            f"{config.name!r}: {', '.join(map(str, kept))}; go on with one of them by `headway "
            "resume FOLDER`, or delete the others"
        )
    return kept[0] if kept else None


def from_backup(backup: Path, runs_dir: Path, say: Say) -> RunDirectory:
    """Make the folder of a run anew from its backup, in `runs_dir`, and return it.

    Raises InputError for a folder that exists, and LedgerError for what is no backup.
    """
    directory = RunDirectory((runs_dir / read_current(backup)["name"]).absolute())
    partial = RunDirectory(directory.path.with_name(f".{directory.path.name}.restored"))
    try:
        with directory.lock.named():
            if directory.path.exists():
                raise InputError(
                    f"{directory.path} exists: go on with `headway resume {directory.path}`, or "
                    "move it away so that the run is made anew from its backup"
                )
            say(f"{directory.path} is made anew from its backup {backup}")
            shutil.rmtree(partial.path, ignore_errors=True)
            for folder in (partial.path, partial.logs):
                folder.mkdir(backup.stat().st_mode & 0o777)
            partial.backup.symlink_to(backup.resolve())
            partial.checkpoints.symlink_to(restore(backup, partial.path))
            recipe = last_recipe(partial)
            if recipe is None:
                raise LedgerError(f"{backup} was made before a session of its run began")
            partial.store_recipe(recipe)
            partial.path.rename(directory.path)
    except BlockingIOError:
        raise InputError(f"another command makes {directory.path}; wait for its end") from None
    return directory


@contextmanager
def named_backup(directory: RunDirectory) -> Iterator[None]:
    """Refuse a run that went on elsewhere, and name its backup in errors of damage of the block.

    Raises LedgerError, or what the block raises.
    """
    backup = directory.backup.resolve() if directory.backup.is_symlink() else None
    if backup is not None:
        check_backup(directory.path, backup)
    try:
        yield
    except (LedgerError, JournalError) as error:
        if backup is None:
            raise
        raise type(error)(
            f"{error}; or move {directory.path} away, and `headway resume {backup}` makes it anew"
        ) from error

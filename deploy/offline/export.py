"""`headway export`: copies the newest checkpoint into a plain model folder."""

import shutil
from pathlib import Path

from deploy.errors import InputError
from deploy.storage.atomic_folder import atomic_folder
from deploy.storage.run_directory import RunDirectory
from queues.readers.checkpoints import newest_checkpoint

EXCLUDED = shutil.ignore_patterns("optimizer", "critic", "reference", "state.json")


def export_model(directory: RunDirectory, to: Path) -> int:
    """Copy config, weights and tokenizer of the newest committed checkpoint; return its version.

    Raises:
        InputError: There is no checkpoint yet, or the folder exists.
    """
    if to.exists():
        raise InputError(f"{to} exists; name a folder that does not")
    checkpoint = newest_checkpoint(directory.path)
    if checkpoint is None:
        raise InputError(f"{directory.path} has no checkpoint yet")
    with atomic_folder(to, replace=False) as partial:
        while True:
            version, folder = checkpoint
            try:
                shutil.copytree(folder, partial, ignore=EXCLUDED, dirs_exist_ok=True)
            except OSError:
                newest = newest_checkpoint(directory.path)
                if newest is None or newest == checkpoint:
                    raise
                shutil.rmtree(partial)  # the run has saved another and deleted this one meanwhile
                checkpoint = newest
            else:
                return version

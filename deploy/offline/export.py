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
    version, folder = checkpoint
    with atomic_folder(to, replace=False) as partial:
        shutil.copytree(folder, partial, ignore=EXCLUDED, dirs_exist_ok=True)
    return version

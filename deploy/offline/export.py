"""`headway export`: copies the newest checkpoint into a plain model folder."""

import shutil
from pathlib import Path

from deploy.errors import InputError
from deploy.storage.atomic_folder import atomic_folder
from deploy.storage.recovery import examine
from deploy.storage.run_directory import RunDirectory
from queues.runtime.folder_checksums import FILE_NAME

EXCLUDED = shutil.ignore_patterns("optimizer", "critic", "reference", "state.json", FILE_NAME)


def export_model(directory: RunDirectory, to: Path) -> int:
    """Copy config, weights and tokenizer of the newest committed checkpoint; return its version.

    Raises:
        InputError: There is no checkpoint yet, it is damaged, or the folder exists.
    """
    if to.exists():
        raise InputError(f"{to} exists; name a folder that does not")
    checkpoint = next(examine(directory), None)
    if checkpoint is None:
        raise InputError(f"{directory.path} has no checkpoint yet")
    version, folder, damage = checkpoint
    if damage is not None:
        raise InputError(
            f"checkpoint {version} is damaged: {damage}; put it back from a copy, or go back to "
            f"the last one that is whole: headway salvage {directory.path}"
        )
    with atomic_folder(to, replace=False) as partial:
        shutil.copytree(folder, partial, ignore=EXCLUDED, dirs_exist_ok=True)
    return version

"""`headway export`: copies the newest checkpoint into a plain model or adapter folder."""

import shutil
from pathlib import Path

from deploy.storage.atomic_folder import atomic_folder
from deploy.storage.repair.whole_checkpoints import examine
from deploy.storage.run_directory import RunDirectory
from headway.errors import InputError
from headway.folder_checksums import FILE_NAME
from queues.readers.checkpoints import newest_checkpoint, read_progress

EXCLUDED = shutil.ignore_patterns("optimizer", "critic", "reference", "state.json", FILE_NAME)


def export_model(
    directory: RunDirectory, to: Path, *, adapter: bool = False, base: str | None = None
) -> int:
    """Copy config, weights and tokenizer of the newest committed checkpoint; return its version.

    An adapter is merged into its model, unless `adapter` asks for it alone; `base` is the model's
    folder or hub name where it is another one than the run had. Raises InputError if there is no
    whole checkpoint or no adapter, or if the folder exists.
    """
    from learner.config.lora import CONFIG_FILE
    from learner.engine.model_folder import merge_adapter

    if to.exists():
        raise InputError(f"{to} exists; name a folder that does not")
    version, folder = _newest(directory)
    with atomic_folder(to, replace=False) as partial:
        while True:
            try:
                shutil.copytree(folder, partial, ignore=EXCLUDED, dirs_exist_ok=True)
            except OSError:
                copied, (version, folder) = version, _newest(directory)
                if version == copied:
                    raise
                shutil.rmtree(partial)  # the run has saved another and deleted this one meanwhile
            else:
                break
        if adapter and not (partial / CONFIG_FILE).exists():
            raise InputError(f"{directory.path} trained whole weights: export it without --adapter")
        if (partial / CONFIG_FILE).exists() and not adapter:
            merge_adapter(partial, base)
    return version


def _newest(directory: RunDirectory) -> tuple[int, Path]:
    """Return version and folder of the newest checkpoint, even while the run saves others."""
    while True:
        recorded = read_progress(directory.path, verify=False).checkpoints
        checkpoint = next(examine(directory, recorded), None)
        if checkpoint is None:
            raise InputError(f"{directory.path} has no checkpoint yet")
        version, folder, damage = checkpoint
        if damage is None:
            return version, folder
        newest = newest_checkpoint(directory.path)
        if newest is None or newest[0] == version:
            raise InputError(
                f"checkpoint {version} is damaged: {damage}; put it back from a copy, or go back "
                f"to the last one that is whole: headway salvage {directory.path}"
            )

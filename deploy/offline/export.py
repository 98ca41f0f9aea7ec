"""`headway export`: copies a checkpoint into a plain model or adapter folder."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deploy.storage.atomic_folder import atomic_folder
from deploy.storage.remote_folder import ADDRESS, RemoteFolder
from deploy.storage.repair.whole_checkpoints import examine
from deploy.storage.run_directory import RunDirectory
from headway.errors import InputError
from headway.folder_checksums import FILE_NAME, compute, files_of
from queues.readers.checkpoints import Checkpoint, newest_checkpoint, read_progress

EXCLUDED = shutil.ignore_patterns("optimizer", "critic", "reference", "state.json", FILE_NAME)


def export_model(
    directory: RunDirectory,
    to: Path,
    *,
    version: int | None = None,
    adapter: bool = False,
    base: str | None = None,
) -> int:
    """Copy config, weights and tokenizer of a committed checkpoint; return its version.

    It is that of `version`, or the newest. An adapter is merged into its model, unless `adapter`
    asks for it alone; `base` is the model's folder or hub name where it is another one than the run
    had. Raises InputError if there is no such whole checkpoint or no adapter, or if the folder
    exists.
    """
    from learner.config.lora import CONFIG_FILE
    from learner.engine.model_folder import merge_adapter

    if to.exists():
        raise InputError(f"{to} exists; name a folder that does not")
    wanted = version
    version, folder = _whole(directory, wanted)
    with atomic_folder(to, replace=False) as partial:
        while True:
            try:
                shutil.copytree(folder, partial, ignore=EXCLUDED, dirs_exist_ok=True)
            except OSError:
                copied, (version, folder) = version, _whole(directory, wanted)
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


@contextmanager
def export_folder(to: str) -> Iterator[Path]:
    """Yield the folder to export to; that of an address is copied there at the end of the block.

    Raises InputError for an address that cannot be used, or has a folder, and UploadFailed.
    """
    if not ADDRESS.fullmatch(to):
        yield Path(to)
        return
    remote = RemoteFolder(to)
    remote.check(absent=True)
    with tempfile.TemporaryDirectory(prefix="headway-export-") as temporary:
        folder = Path(temporary) / "model"
        yield folder
        (folder / FILE_NAME).write_text(json.dumps(compute(folder, files_of(folder))))
        remote.upload(folder)


def checkpoints_of(directory: RunDirectory, version: int | None = None) -> list[Checkpoint]:
    """Return the committed checkpoints of a run, or that of a version; InputError if it has none.

    A checkpoint that is not the newest may have been removed since.
    """
    recorded = read_progress(directory.path, verify=False).checkpoints
    if version is not None:
        there = [checkpoint for checkpoint in recorded if checkpoint.folder.is_dir()]
        recorded = [checkpoint for checkpoint in there if checkpoint.version == version]
        if there and not recorded:
            raise InputError(
                f"{directory.path} has no checkpoint of version {version}; there are those of "
                f"{', '.join(str(checkpoint.version) for checkpoint in there)}; "
                "learner.checkpoint_every and learner.keep_checkpoints say which are kept"
            )
    if not recorded:
        raise InputError(f"{directory.path} has no checkpoint yet")
    return recorded


def _whole(directory: RunDirectory, wanted: int | None) -> tuple[int, Path]:
    """Return version and folder of a checkpoint, even while the run saves and deletes others."""
    while True:
        version, folder, damage = next(examine(directory, checkpoints_of(directory, wanted)))
        if damage is None:
            return version, folder
        newest = newest_checkpoint(directory.path)
        if newest is None or newest[0] == version or (wanted is not None and folder.is_dir()):
            raise InputError(
                f"checkpoint {version} is damaged: {damage}; put it back from a copy, or go back "
                f"to the last one that is whole: headway salvage {directory.path}"
            )

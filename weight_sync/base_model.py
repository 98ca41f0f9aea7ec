"""The model folder that adapters are merged into, and a fingerprint by which it is recognised.

A hub name stands for the snapshot on this machine: nothing is fetched. Imports no torch.
"""

from collections.abc import Iterable
from pathlib import Path

import xxhash

from weight_sync.errors import LoadFailed

PROBES = 64
PROBE_BYTES = 2**16


def fingerprint(files: Iterable[Path]) -> str:
    """Return a fingerprint of files: names, sizes and PROBES parts, which training changes."""
    digest, size = xxhash.xxh3_64(), 0
    for file in sorted(files):
        length = file.stat().st_size
        size += length
        digest.update(f"{file.name}\0{length}\0".encode())
        with file.open("rb") as opened:
            for probe in range(PROBES):
                opened.seek(length * probe // PROBES)
                digest.update(opened.read(PROBE_BYTES))
    return f"{size} bytes, {digest.hexdigest()}"


def folder_of(model: str) -> Path | None:
    """Return the folder of a model, of a hub name the snapshot here; None if there is none."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    if model and Path(model).is_dir():
        return Path(model)
    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def fingerprint_of_weights(model: str) -> str:
    """Return a fingerprint of the weights of a folder or hub name; "" if they are not here."""
    folder = folder_of(model)
    files = [*folder.glob("model*.safetensors")] if folder else []
    return fingerprint(files) if files else ""


def base_folder(model: str, base: str) -> Path:
    """Return the folder whose weights an engine merges adapters of the base into.

    Raises LoadFailed if it is not here, or has another fingerprint than `base`, unless that is "".
    """
    folder = folder_of(model)
    if folder is None:
        raise LoadFailed(f"the weights of {model!r}, which the adapter changes, are not here")
    if base and (present := fingerprint_of_weights(str(folder))) != base:
        raise LoadFailed(
            f"{str(folder)!r} has other weights than those that the learner's adapter changes "
            f"({present or 'none'} here, {base} there): put them back"
        )
    return folder

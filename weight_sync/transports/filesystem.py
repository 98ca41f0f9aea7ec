"""Transport `filesystem`: files in a folder that all nodes share.

    folder/<version>-<publisher>/bucket-00000.safetensors …   written, synced, then renamed
    folder/<version>-<publisher>/manifest.json                last: the version is complete
    folder/owner                                              the run that it belongs to (`claim`)

A bucket is a safetensors file; the output of a codec is stored in it as one tensor of bytes.
Receivers copy each file into sealed memory, since it could still change.
"""

import json
import os
import re
import shutil
import threading
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from headway.atomic_file import sync_path
from headway.errors import InputError
from weight_sync.buckets import Piece
from weight_sync.errors import StagingError
from weight_sync.manifest import Bucket, Manifest
from weight_sync.transports.protocol import Transport
from weight_sync.transports.sealed_memory import (
    SealedBucket,
    bucket_checksum,
    is_sealed,
    open_verified,
    seal_verified,
)

MANIFEST = "manifest.json"
OWNER = "owner"
"""File that names the run to which the folder belongs."""
_VERSION_FOLDER = re.compile(r"\d{8,}-[0-9a-f]{8}")
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64"}
"""Safetensors' names of the dtypes of a manifest."""


class FilesystemTransport(Transport):
    """Stores and opens buckets in a shared folder, in which the newest version stays."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self._publisher = uuid.uuid4().hex[:8]
        self._written: dict[int, int] = {}
        """Number of the last bucket of each version."""
        self._numbering = threading.Lock()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"weight_sync.folder cannot be made: {error}") from None

    def write(self, version: int, nbytes: int, pieces: Iterable[Piece]) -> Bucket:
        pieces = list(pieces)
        with self._numbering:
            number = self._written[version] = self._written.get(version, -1) + 1
        file = self._version_folder(version) / f"bucket-{number:05d}.safetensors"
        file.parent.mkdir(exist_ok=True)
        _write_synced(file, [_header(pieces), *(piece.memory for piece in pieces)])
        return Bucket(nbytes=nbytes, checksum=bucket_checksum(nbytes, pieces), location=str(file))

    def commit(self, manifest: Manifest) -> None:
        own = self._version_folder(manifest.version)
        _write_synced(own / MANIFEST, [memoryview(manifest.to_json().encode())])
        self._written = {v: n for v, n in self._written.items() if v >= manifest.version}
        keep = {self._version_folder(version).name for version in self._written} | {own.name}
        for folder in self._folder.iterdir():
            if _VERSION_FOLDER.fullmatch(folder.name) and folder.name not in keep:
                shutil.rmtree(folder, ignore_errors=True)

    def open(self, bucket: Bucket) -> SealedBucket:
        if is_sealed(bucket):
            return open_verified(bucket)
        try:
            content = memoryview(Path(bucket.location).read_bytes())
            return seal_verified(bucket, bucket.nbytes, _parse(bucket, content))
        except OSError as error:
            raise StagingError(f"bucket at {bucket.location} cannot be read: {error}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StagingError(f"bucket at {bucket.location} is not valid: {error!r}") from error

    def close(self) -> None:
        """Do nothing: the newest version stays on the disk."""

    def _version_folder(self, version: int) -> Path:
        return self._folder / f"{version:08d}-{self._publisher}"


def claim(folder: Path, run: str) -> None:
    """Reserve a folder for one run; InputError if it is another's, or cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with (folder / OWNER).open("x") as file:
                file.write(run)
        except FileExistsError:
            owner = (folder / OWNER).read_text()
            if owner != run:
                raise InputError(
                    f"weight_sync.folder = {str(folder)!r} belongs to the run {owner}; choose "
                    f"another folder for {run}, or delete this one if that run is over"
                ) from None
    except OSError as error:
        raise InputError(f"weight_sync.folder cannot be used: {error}") from None


def _header(pieces: list[Piece]) -> memoryview:
    """Return the header of a safetensors file, with the offsets in the bucket as metadata."""
    header: dict[str, Any] = {}
    offsets, end = {}, 0
    for number, (offset, memory, tensor) in enumerate(pieces):
        name = tensor.name if tensor else f"bytes.{number}"
        begin, end = end, end + memory.nbytes
        header[name] = {
            "dtype": _DTYPES[tensor.dtype] if tensor else "U8",
            "shape": list(tensor.shape) if tensor else [memory.nbytes],
            "data_offsets": [begin, end],
        }
        offsets[name] = offset
    header["__metadata__"] = {"offsets": json.dumps(offsets)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format wants tensors to start at a multiple of 8 bytes
    return memoryview(len(text).to_bytes(8, "little") + text)


def _parse(bucket: Bucket, content: memoryview) -> list[Piece]:
    """Return the tensors of a file as pieces of its bucket; its checksum covers all they hold."""
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(bytes(content[8:start]))
    pieces = []
    for name, offset in json.loads(header["__metadata__"]["offsets"]).items():
        first, last = header[name]["data_offsets"]
        if not 0 <= offset <= bucket.nbytes:
            raise ValueError(f"tensor {name!r} is at byte {offset} of {bucket.nbytes}")
        pieces.append(Piece(offset, content[start + first : start + last]))
    return pieces


def _write_synced(file: Path, parts: Iterable[memoryview]) -> None:
    """Write a file atomically and durably, without a lock, which not every shared disk has."""
    temporary = file.with_name(f".{file.name}.partial")
    with temporary.open("wb") as writing:
        writing.writelines(parts)
        writing.flush()
        os.fsync(writing.fileno())
    temporary.rename(file)
    sync_path(file.parent)

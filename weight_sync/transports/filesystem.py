"""Buckets as files of a folder that all nodes share, for clusters that share nothing else.

    folder/<version>-<publisher>/bucket-00000.safetensors …   written, synced, then renamed
    folder/<version>-<publisher>/manifest.json                last: the version is complete
    folder/owner                                              the run that it belongs to (`claim`)

A bucket of tensors is a safetensors file that any reader of the format understands; one that only a
codec can read holds one tensor of bytes. Old versions are removed when a newer one is committed;
the newest stays when the publisher is gone, so that a restarted engine can be seeded (`newest`).
Receivers copy what they read into sealed memory of their own: a file
could still change, and another process of the engine has to be able to map it.
"""

import json
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from weight_sync.errors import InputError, ManifestError, StagingError
from weight_sync.manifest import Bucket, Manifest
from weight_sync.transports.protocol import Piece
from weight_sync.transports.shared_memory import (
    SharedMemoryBucket,
    SharedMemoryTransport,
    check_checksum,
    hashed,
    is_staged,
    seal,
)

MANIFEST = "manifest.json"
OWNER = "owner"
"""Names the run whose folder it is."""
_VERSION_FOLDER = re.compile(r"\d{8,}-[0-9a-f]{8}")
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64"}
"""What safetensors calls the dtypes of a manifest."""


class FilesystemTransport:
    """Stores and opens buckets in a shared folder (a `Transport`).

    Args:
        folder: Seen by learner and engines under the same path; made where it is missing.

    Raises:
        InputError: The folder cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self._publisher = uuid.uuid4().hex[:8]
        self._written: dict[int, int] = {}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"weight_sync.folder cannot be made: {error}") from None

    def write(self, version: int, nbytes: int, pieces: Iterable[Piece]) -> Bucket:
        """See `Transport.write`; the file is on the disk when this returns."""
        pieces = list(pieces)
        number = self._written[version] = self._written.get(version, -1) + 1
        file = self._version_folder(version) / f"bucket-{number:05d}.safetensors"
        file.parent.mkdir(exist_ok=True)
        _write_synced(file, [_header(nbytes, pieces), *(piece.memory for piece in pieces)])
        return Bucket(nbytes=nbytes, checksum=hashed(nbytes, pieces), location=str(file))

    def commit(self, manifest: Manifest) -> None:
        """See `Transport.commit`; writes the manifest, then removes every other version."""
        own = self._version_folder(manifest.version)
        _write_synced(own / MANIFEST, [memoryview(manifest.to_json().encode())])
        self._written = {v: n for v, n in self._written.items() if v >= manifest.version}
        keep = {self._version_folder(version).name for version in self._written} | {own.name}
        for folder in _versions(self._folder):
            if folder.name not in keep:
                shutil.rmtree(folder, ignore_errors=True)

    def open(self, bucket: Bucket) -> SharedMemoryBucket:
        """See `Transport.open`."""
        if is_staged(bucket):
            return SharedMemoryTransport().open(bucket)
        try:
            content = Path(bucket.location).read_bytes()
        except OSError as error:
            raise StagingError(f"bucket at {bucket.location} cannot be read: {error}") from error
        pieces = _parse(bucket, memoryview(content))
        held = seal(bucket.nbytes, pieces)
        try:
            check_checksum(bucket, held.bucket.checksum)
        except BaseException:
            held.close()
            raise
        return held

    def close(self) -> None:
        """See `Transport.close`; the newest version stays on the disk."""

    def _version_folder(self, version: int) -> Path:
        return self._folder / f"{version:08d}-{self._publisher}"


def claim(folder: Path, run: str) -> None:
    """Makes a folder that of one run, for good: each commit removes the versions of all others.

    Args:
        folder: Made where it is missing.
        run: Names the run, the same whenever it goes on.

    Raises:
        InputError: It is another run's, or cannot be written.
    """
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


def newest(folder: Path) -> Manifest | None:
    """The newest complete version in a folder, whoever wrote it; None where there is none.

    Raises:
        ManifestError: Its manifest cannot be read.
    """
    while True:
        versions = sorted(_versions(folder))
        found = [manifest for version in versions if (manifest := _manifest_of(version))]
        if found or sorted(_versions(folder)) == versions:  # else: pruned while they were read
            return max(found, key=lambda m: (m.created_at, m.version), default=None)


def _manifest_of(version: Path) -> Manifest | None:
    try:
        return Manifest.from_json((version / MANIFEST).read_text())
    except FileNotFoundError:
        return None  # not complete, or pruned
    except OSError as error:
        raise ManifestError(f"{version / MANIFEST} cannot be read: {error}") from error


def _versions(folder: Path) -> Iterator[Path]:
    return (entry for entry in folder.iterdir() if _VERSION_FOLDER.fullmatch(entry.name))


def _header(nbytes: int, pieces: list[Piece]) -> memoryview:
    """The head of a safetensors file: its length, then names, places and our own offsets."""
    header: dict[str, Any] = {}
    offsets, end = {}, 0
    for number, piece in enumerate(pieces):
        tensor = piece.tensor
        name = tensor.name if tensor else f"bytes.{number}"
        header[name] = {
            "dtype": _DTYPES[tensor.dtype] if tensor else "U8",
            "shape": list(tensor.shape) if tensor else [piece.memory.nbytes],
            "data_offsets": [end, end + piece.memory.nbytes],
        }
        offsets[name] = piece.offset
        end += piece.memory.nbytes
    header["__metadata__"] = {"nbytes": str(nbytes), "offsets": json.dumps(offsets)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8 bytes, as the format wants
    return memoryview(len(text).to_bytes(8, "little") + text)


def _parse(bucket: Bucket, content: memoryview) -> list[Piece]:
    """Where the tensors of a file go in its bucket.

    Raises:
        StagingError: The file is truncated or was not written for this bucket.
    """
    try:
        start = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(bytes(content[8:start]))
        metadata = header.pop("__metadata__")
        if int(metadata["nbytes"]) != bucket.nbytes:
            raise ValueError(f"{metadata['nbytes']} bytes; its manifest says {bucket.nbytes}")
        pieces, end = [], 0
        for name, offset in json.loads(metadata["offsets"]).items():
            first, last = header[name]["data_offsets"]
            piece = Piece(offset, content[start + first : start + last])
            if piece.memory.nbytes != last - first or not end <= offset <= bucket.nbytes:
                raise ValueError(f"tensor {name!r} is truncated or misplaced")
            end = offset + piece.memory.nbytes
            pieces.append(piece)
        if end > bucket.nbytes or len(pieces) != len(header):
            raise ValueError(f"tensors end at byte {end} of {bucket.nbytes}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StagingError(f"bucket at {bucket.location} is no such bucket: {error}") from error
    return pieces


def _write_synced(file: Path, parts: Iterable[memoryview]) -> None:
    """A file that is there whole or not at all, also after a power cut."""
    temporary = file.with_name(f".{file.name}.partial")
    with temporary.open("wb", buffering=0) as writing:
        for part in parts:
            done = 0
            while done < part.nbytes:
                done += writing.write(part[done:])
        os.fsync(writing.fileno())
    temporary.rename(file)
    folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)

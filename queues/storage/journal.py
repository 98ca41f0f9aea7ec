"""Accepted groups on disk: numbered segments of checksummed frames, only ever appended to.

    frame = length u32 · checksum u64 · payload (an Arrow IPC stream)      little-endian

A frame counts once the ledger has committed its `Location`; other frames are garbage. The ledger
has the checksum too, so that no segment is taken for another. A journal that is opened again begins
a new segment. Calls block; one thread writes, any may read.
"""

import logging
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

import xxhash

from headway.atomic_file import sync_path
from queues.errors import JournalError
from queues.records import Payload

log = logging.getLogger(__name__)
_HEADER = struct.Struct("<IQ")
_LARGEST = 2**32 - 1


class Location(NamedTuple):
    """The frame of a payload of `length` bytes; columns of the ledger by the same names."""

    segment: int
    offset: int
    length: int
    checksum: int


LOCATION = ", ".join(Location._fields)
"""The columns of a `Location`, for SQL."""


class Journal:
    """The writing side of a journal."""

    def __init__(self, directory: Path, *, segment_bytes: int) -> None:
        self.directory = directory
        self._segment_bytes = segment_bytes
        self._file: BinaryIO | None = None
        self._synced = 0
        """Bytes of the segment that `commit` has made durable."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self.newest = max(segments(directory), default=0)
            """Number of the newest segment; later frames are in this one or a later one."""
        except (OSError, ValueError) as error:
            raise JournalError(f"{directory}: cannot be opened: {error}") from error

    def begin(self) -> None:
        """Do nothing: frames that are not committed are garbage by themselves."""

    def append(self, payload: Payload) -> Location:
        """Append a frame; it is durable only after `commit`."""
        if len(payload) > _LARGEST:
            raise JournalError(f"payload of {len(payload)} bytes, at most {_LARGEST} fit a frame")
        if self._file is None or self._file.tell() >= self._segment_bytes:
            self.close()
            self.newest, self._synced = self.newest + 1, 0
            self._file = segment_path(self.directory, self.newest).open("xb")
            sync_path(self.directory)
        assert self._file is not None
        offset = self._file.tell()
        checksum = checksum_of(payload)
        self._file.write(_HEADER.pack(len(payload), checksum))
        self._file.write(payload)
        return Location(self.newest, offset, len(payload), checksum)

    def commit(self) -> None:
        """Make every frame so far survive the loss of power (fdatasync)."""
        if self._file is not None and self._file.tell() > self._synced:
            self._file.flush()
            os.fdatasync(self._file.fileno())
            self._synced = self._file.tell()

    def rollback(self) -> None:
        """Discard every frame since the last `commit`; the next append begins a new segment.

        After a failed sync a repeated one may report success, so this segment is not used again.
        """
        if self._file is None:
            return
        path = segment_path(self.directory, self.newest)
        with suppress(OSError):  # closing flushes the buffer
            self._file.close()
        self._file = None
        with suppress(OSError):
            if self._synced:
                os.truncate(path, self._synced)
            else:
                path.unlink()

    def close(self) -> None:
        """Sync and close; the next append begins a new segment."""
        if self._file is not None:
            self.commit()
            self._file.close()
            self._file = None


def read_group(directory: Path, location: Sequence[int]) -> bytes:
    """Return the verified payload of one frame; JournalError if it is missing or damaged.

    The location may be a row of the columns LOCATION.
    """
    segment, offset, length, checksum = location
    path = segment_path(directory, segment)
    try:
        with path.open("rb") as file:
            file.seek(offset)
            header, payload = file.read(_HEADER.size), file.read(length)
    except OSError as error:
        raise JournalError(f"{path}: cannot be read: {error}") from error
    if header != _HEADER.pack(length, checksum) or checksum_of(payload) != checksum:
        raise JournalError(
            f"{path}: the frame at byte {offset} is truncated, damaged or another one"
        )
    return payload


def checksum_of(payload: Payload) -> int:
    """Return the checksum of a payload: the 63 bits of xxh3_64 that SQLite can hold."""
    return xxhash.xxh3_64_intdigest(payload) >> 1


def segments(directory: Path) -> list[int]:
    """Return the numbers of the segments on disk, ascending."""
    return sorted(int(path.stem) for path in directory.glob("*.segment"))


def remove_segment(directory: Path, segment: int) -> None:
    """Remove a segment; a failure is logged."""
    path = segment_path(directory, segment)
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s cannot be removed: %s", path, error)


def segment_path(directory: Path, segment: int) -> Path:
    """Return the file of a segment."""
    return directory / f"{segment:08d}.segment"

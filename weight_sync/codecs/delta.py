"""Codec `delta`: a patch holds the elements of a bucket whose value on the wire changed.

A patch is a header, then two streams compressed by zstandard: the gaps between the changed elements
and their new values, each split into byte planes, since the upper bytes of both hardly vary. It
pays where steps are small against the wire's precision (arXiv:2602.03839).
"""

import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import zstandard
from numpy.typing import NDArray

from weight_sync.buckets import BucketPlan, Piece
from weight_sync.errors import StagingError, WrongBase
from weight_sync.manifest import ITEM_BYTES, Bucket

LEVEL = 1
"""Compression level of zstandard; higher ones save little on byte planes."""
MOST_CHANGED = 0.5
"""Share of changed elements above which nothing is encoded, since it would not pay."""

_HEADER = struct.Struct("<4sBBQQQ32s")
_MAGIC = b"HWD1"
_WORDS: dict[int, Any] = {2: np.uint16, 4: np.uint32, 8: np.uint64}

Bytes = NDArray[np.uint8]


class Patch(NamedTuple):
    """The difference between one bucket and its successor."""

    payload: bytes | None
    """The encoded patch; None if too many elements changed."""
    changed: int
    """Elements whose bits differ."""
    elements: int


def diff(base: Bytes, pieces: Iterable[Piece], item_bytes: int, *, base_checksum: str) -> Patch:
    """Encode the elements of a bucket that differ from `base`, an earlier bucket's bytes.

    Elements have `item_bytes`: 2, 4 or 8, of which offsets and sizes are multiples.
    """
    word = _WORDS[item_bytes]
    indices: list[NDArray[np.int64]] = []
    values: list[NDArray[Any]] = []
    elements = 0
    for piece in pieces:
        new = np.frombuffer(piece.memory, dtype=word)
        old = base[piece.offset : piece.offset + piece.memory.nbytes].view(word)
        differing = np.flatnonzero(new != old)
        elements += new.size
        indices.append(differing + piece.offset // item_bytes)
        values.append(new[differing])
    changed = sum(part.size for part in indices)
    if changed > MOST_CHANGED * elements:
        return Patch(None, changed, elements)
    gaps = np.diff(np.concatenate(indices), prepend=0)
    width = 2 if gaps.size == 0 or gaps.max() < 2**16 else 4 if gaps.max() < 2**32 else 8
    stream, checksum = _compress(gaps.astype(_WORDS[width])), base_checksum.encode()
    header = _HEADER.pack(_MAGIC, item_bytes, width, base.size, changed, len(stream), checksum)
    return Patch(header + stream + _compress(np.concatenate(values)), changed, elements)


def patched(base: Bytes, base_checksum: str, payload: memoryview) -> Bytes:
    """Apply a patch to a copy of a bucket; WrongBase for another's, StagingError if damaged."""
    expected, item_bytes, indices, values = _parse(payload, base.size)
    if expected != base_checksum:
        raise WrongBase(
            f"a delta applies to a bucket with checksum {expected}, not {base_checksum}"
        )
    result = base.copy()
    result.view(_WORDS[item_bytes])[indices] = values
    return result


class Encoded(NamedTuple):
    """A version relative to the previous one."""

    base_version: int
    patches: list[bytes] | None
    """One per bucket; None if they would be no smaller than the version itself."""
    changed: float
    """Share of elements that differ."""


class DeltaEncoder:
    """Compares every version with the previous call's; holds one copy of the weights."""

    def __init__(self) -> None:
        self._version = -1
        self._plan: BucketPlan | None = None
        self._base: list[Bytes] = []
        self._checksums: list[str] = []

    def encode(
        self,
        version: int,
        plan: BucketPlan,
        pieces: Sequence[Sequence[Piece]],
        buckets: Sequence[Bucket],
    ) -> Encoded | None:
        """Encode a version relative to the previous one and keep it as the next base.

        Returns None for the first version, or if the layout has changed.
        """
        encoded = self._compare(plan, pieces) if plan == self._plan else None
        if encoded is None:
            self._base = [np.zeros(size, dtype=np.uint8) for size in plan.sizes]
        for base, parts in zip(self._base, pieces, strict=True):
            for piece in parts:
                end = piece.offset + piece.memory.nbytes
                base[piece.offset : end] = np.frombuffer(piece.memory, dtype=np.uint8)
        self._version, self._plan = version, plan
        self._checksums = [bucket.checksum for bucket in buckets]
        return encoded

    def _compare(self, plan: BucketPlan, pieces: Sequence[Sequence[Piece]]) -> Encoded:
        item_bytes = [8] * len(plan.sizes)
        for spec in plan.tensors:
            item_bytes[spec.bucket] = min(item_bytes[spec.bucket], ITEM_BYTES[spec.dtype])
        patches = [
            diff(base, parts, item, base_checksum=checksum)
            for base, parts, item, checksum in zip(
                self._base, pieces, item_bytes, self._checksums, strict=True
            )
        ]
        payloads = [patch.payload for patch in patches if patch.payload is not None]
        pays = len(payloads) == len(patches) and sum(map(len, payloads)) < sum(plan.sizes)
        changed = sum(p.changed for p in patches) / sum(p.elements for p in patches)
        return Encoded(self._version, payloads if pays else None, changed)


def _parse(payload: memoryview, size: int) -> tuple[str, int, NDArray[np.int64], NDArray[Any]]:
    """Return base checksum, bytes of an element, indices and new values of a patch."""
    try:
        magic, item_bytes, width, nbytes, changed, length, base = _HEADER.unpack_from(payload)
        if magic != _MAGIC or nbytes != size:
            raise StagingError(f"a delta is for a bucket of {nbytes} bytes, not of {size}")
        if size % item_bytes or changed > size // item_bytes:
            raise StagingError(
                f"a delta changes {changed} elements of {item_bytes} in {size} bytes"
            )
        start = min(_HEADER.size + length, len(payload))
        gaps = _decompress(payload[_HEADER.size : start], _WORDS[width], changed)
        values = _decompress(payload[start:], _WORDS[item_bytes], changed)
        base_checksum = base.decode()
    except (struct.error, zstandard.ZstdError, ArithmeticError, ValueError, KeyError) as error:
        raise StagingError(f"a delta cannot be read: {error}") from error
    indices = np.cumsum(gaps, dtype=np.int64)
    if changed and not (indices.min() >= 0 and indices.max() < size // item_bytes):
        raise StagingError(f"a delta changes element {indices.max()} of {size // item_bytes}")
    return base_checksum, item_bytes, indices, values


def _compress(array: NDArray[Any]) -> bytes:
    planes = array.view(np.uint8).reshape(-1, array.itemsize).T
    return zstandard.ZstdCompressor(level=LEVEL).compress(np.ascontiguousarray(planes).data)


def _decompress(stream: memoryview, word: Any, count: int) -> NDArray[Any]:
    size = np.dtype(word).itemsize
    stated = zstandard.frame_content_size(stream)
    if stated != count * size:  # checked first: decompression would allocate the stated size
        raise ValueError(f"a stream holds {stated} bytes, not {count * size}")
    raw = zstandard.ZstdDecompressor().decompress(stream, max_output_size=count * size)
    planes = np.frombuffer(raw, dtype=np.uint8).reshape(size, count)
    array: NDArray[Any] = np.ascontiguousarray(planes.T).view(word).reshape(count)
    return array

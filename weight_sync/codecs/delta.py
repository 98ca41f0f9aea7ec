"""Codec `delta`: the elements of a bucket whose wire value changed, to be overwritten on a base.

A patch is a head, then two streams compressed by zstandard: the gaps between the changed elements
and their new values, each split into byte planes, since the upper bytes of both hardly vary. New
values overwrite, nothing is added. A patch names the
checksum of its base and is refused on any other. Pays where steps are small beside the spacing of
the wire's values, as in bfloat16 (arXiv:2602.03839). Leaves out which version is whose base
(`delta_encoder`, `staging`).
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from weight_sync.errors import StagingError, WrongBase
from weight_sync.transports.protocol import Piece

LEVEL = 1
"""Of zstandard: higher ones cost much time and save little on planes of bytes."""
MOST_CHANGED = 0.5
"""Share of changed elements above which nothing is encoded: it would not pay."""

_HEAD = struct.Struct("<4sBBQQQ32s")
_MAGIC = b"HWD1"
_WORDS: dict[int, Any] = {2: np.uint16, 4: np.uint32, 8: np.uint64}

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Patch:
    """What turns one bucket into its successor."""

    payload: bytes | None
    """None where too much changed."""
    changed: int
    """Elements whose bits differ."""
    elements: int
    """Elements of the bucket."""


def diff(base: Bytes, pieces: Iterable[Piece], item_bytes: int, *, base_checksum: str) -> Patch:
    """Encodes what changed in a bucket.

    Args:
        base: All bytes of the bucket before, `[nbytes]`.
        pieces: The bucket now, with the offsets of before.
        item_bytes: Bytes of an element, 2, 4 or 8; of the smallest where they differ, so that
            larger ones count as several. Offsets and sizes are multiples of it.
        base_checksum: Of `base`, 32 hexadecimal digits.
    """
    word = _WORDS[item_bytes]
    places: list[NDArray[np.int64]] = []
    values: list[NDArray[Any]] = []
    elements = 0
    for piece in pieces:
        new = np.frombuffer(piece.memory, dtype=word)
        old = base[piece.offset : piece.offset + piece.memory.nbytes].view(word)
        found = np.flatnonzero(new != old)
        elements += new.size
        places.append(found + piece.offset // item_bytes)
        values.append(new[found])
    changed = sum(found.size for found in places)
    if changed > MOST_CHANGED * elements:
        return Patch(None, changed, elements)
    gaps = np.diff(np.concatenate(places), prepend=0)
    width = 2 if gaps.size == 0 or gaps.max() < 2**16 else 4 if gaps.max() < 2**32 else 8
    first = _compress(gaps.astype(_WORDS[width]))
    second = _compress(np.concatenate(values))
    head = _HEAD.pack(
        _MAGIC, item_bytes, width, base.size, changed, len(first), base_checksum.encode()
    )
    return Patch(head + first + second, changed, elements)


def patched(base: Bytes, base_checksum: str, payload: memoryview) -> Bytes:
    """The successor of a bucket, in memory of its own.

    Raises:
        WrongBase: The patch was made for another bucket.
        StagingError: The patch is damaged.
    """
    wanted, item_bytes, places, values = _parse(payload, base.size)
    if wanted != base_checksum:
        raise WrongBase(f"a delta applies to a bucket with checksum {wanted}, not {base_checksum}")
    result = base.copy()
    result.view(_WORDS[item_bytes])[places] = values
    return result


def _parse(payload: memoryview, size: int) -> tuple[str, int, NDArray[np.int64], NDArray[Any]]:
    """Base checksum, bytes of an element, indices and new values of a patch."""
    try:
        magic, item_bytes, width, nbytes, changed, length, base = _HEAD.unpack_from(payload)
        if magic != _MAGIC or nbytes != size:
            raise StagingError(f"a delta is for a bucket of {nbytes} bytes, not of {size}")
        if size % item_bytes or changed > size // item_bytes:
            raise StagingError(
                f"a delta changes {changed} elements of {item_bytes} in {size} bytes"
            )
        start = min(_HEAD.size + length, len(payload))
        gaps = _decompress(payload[_HEAD.size : start], _WORDS[width], changed)
        values = _decompress(payload[start:], _WORDS[item_bytes], changed)
        base_checksum = base.decode()
    except (struct.error, zstandard.ZstdError, ArithmeticError, ValueError, KeyError) as error:
        raise StagingError(f"a delta cannot be read: {error}") from error
    places = np.cumsum(gaps, dtype=np.int64)
    if changed and not (places.min() >= 0 and places.max() < size // item_bytes):
        raise StagingError(f"a delta changes element {places.max()} of {size // item_bytes}")
    return base_checksum, item_bytes, places, values


def _compress(array: NDArray[Any]) -> bytes:
    planes = array.view(np.uint8).reshape(-1, array.itemsize).T
    return zstandard.ZstdCompressor(level=LEVEL).compress(np.ascontiguousarray(planes).data)


def _decompress(stream: memoryview, word: Any, count: int) -> NDArray[Any]:
    size = np.dtype(word).itemsize
    stated = zstandard.frame_content_size(stream)
    if stated != count * size:  # asked first: so much memory would be taken, whatever there is
        raise ValueError(f"a stream holds {stated} bytes, not {count * size}")
    raw = zstandard.ZstdDecompressor().decompress(stream, max_output_size=count * size)
    planes = np.frombuffer(raw, dtype=np.uint8).reshape(size, count)
    array: NDArray[Any] = np.ascontiguousarray(planes.T).view(word).reshape(count)
    return array

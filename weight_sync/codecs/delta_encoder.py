"""The delta encoder compares every version with the previous one, of which it keeps a copy."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from weight_sync.buckets import BucketPlan, Piece
from weight_sync.codecs.delta import Bytes, diff
from weight_sync.manifest import ITEM_BYTES, Bucket


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

        Args:
            version: Its number.
            plan: Layout of its tensors.
            pieces: The bytes of each bucket.
            buckets: The stored buckets, for their checksums.

        Returns:
            None for the first version, or if the layout has changed.
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

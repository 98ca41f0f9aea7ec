"""What the publisher keeps for deltas: the bytes of its last version, beside those of the next.

Costs one more copy of the weights in host memory. Leaves out how a bucket is compared (`delta`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from weight_sync.buckets import BucketPlan
from weight_sync.codecs.delta import Bytes, diff
from weight_sync.manifest import ITEM_BYTES, Bucket
from weight_sync.transports.protocol import Piece


class Encoded(NamedTuple):
    """A version against the one before it."""

    base_version: int
    patches: list[bytes] | None
    """One for each bucket; None where they would be no smaller than the version itself."""
    changed: float
    """Share of elements that differ."""


class DeltaEncoder:
    """Compares every version with the one given before it."""

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
        """The version against the last one, whose place it takes.

        Args:
            version: Its number.
            plan: Where its tensors lie.
            pieces: The bytes of each bucket.
            buckets: The same as they were stored, for their checksums.

        Returns:
            None where there is no last one, or its tensors were others.
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
        items = [8] * len(plan.sizes)
        for spec in plan.tensors:
            items[spec.bucket] = min(items[spec.bucket], ITEM_BYTES[spec.dtype])
        found = [
            diff(base, parts, item, base_checksum=checksum)
            for base, parts, item, checksum in zip(
                self._base, pieces, items, self._checksums, strict=True
            )
        ]
        patches = [patch.payload for patch in found if patch.payload is not None]
        pays = len(patches) == len(found) and sum(map(len, patches)) < sum(plan.sizes)
        changed = sum(p.changed for p in found) / sum(p.elements for p in found)
        return Encoded(self._version, patches if pays else None, changed)

"""Verified weights of one version on this node, ready to be loaded. No engine is touched here."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from weight_sync.codecs.delta import patched
from weight_sync.errors import StagingError, WrongBase
from weight_sync.manifest import ITEM_BYTES, Bucket, Manifest, TensorSpec
from weight_sync.transports.protocol import Piece, StagedBucket, Transport
from weight_sync.transports.shared_memory import check_checksum, seal

logger = logging.getLogger(__name__)

DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
"""Torch's dtype for every name that a manifest may carry."""


class StagedWeights:
    """All buckets of a version, verified and held open by this process."""

    def __init__(
        self, manifest: Manifest, buckets: Iterable[StagedBucket], *, codec: str, moved: int
    ) -> None:
        self._buckets = tuple(buckets)
        self.manifest = replace(
            manifest, buckets=tuple(held.bucket for held in self._buckets), delta=None
        )
        """Its locations point to what this process holds, valid until `close`."""
        self.codec = codec
        """How it came: "full" or "delta"."""
        self.moved = moved
        """Bytes that were fetched for it."""

    @property
    def memories(self) -> list[memoryview]:
        """The bytes of every bucket."""
        return [held.memory for held in self._buckets]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors in the order of the manifest; views, not copies."""
        return tensor_views(self.manifest.tensors, self.memories)

    def close(self) -> None:
        """Gives the buckets back; tensors that still exist stay valid."""
        for held in self._buckets:
            held.close()


def stage(
    manifest: Manifest, transport: Transport, base: StagedWeights | None = None
) -> StagedWeights:
    """Fetches and verifies a version; blocks.

    By its delta where `base` is the version that it was made for, and the whole version otherwise,
    or when the delta cannot be had or gives anything but the bytes that the manifest promises.

    Args:
        manifest: The version.
        transport: Opens its buckets.
        base: Another version, still open; it is not changed.

    Raises:
        StagingError: One bucket cannot be had or verified; none is held then.
    """
    delta = manifest.delta
    if delta and base is not None and base.manifest.version == delta.base_version:
        try:
            return stage_delta(manifest, transport, base)
        except StagingError as error:
            logger.warning("version %d comes whole: %s", manifest.version, error)
    buckets = _all_or_none(transport.open(bucket) for bucket in manifest.buckets)
    return StagedWeights(manifest, buckets, codec="full", moved=manifest.nbytes)


def stage_delta(manifest: Manifest, transport: Transport, base: StagedWeights) -> StagedWeights:
    """Makes a version out of another one and the delta; blocks.

    Raises:
        WrongBase: The delta was made for other weights than `base`, or there is none.
        StagingError: A patch cannot be had or verified, or the result is not what it should be.
    """
    delta = manifest.delta
    if delta is None or len(delta.buckets) != len(base.manifest.buckets):
        raise WrongBase(f"version {manifest.version} has no delta for these weights")

    def result(number: int, patch: Bucket) -> StagedBucket:
        fetched = transport.open(patch)
        try:
            old = np.frombuffer(base.memories[number], dtype=np.uint8)
            new = patched(old, base.manifest.buckets[number].checksum, fetched.memory)
        finally:
            fetched.close()
        held = seal(new.size, [Piece(0, new.data)])
        try:
            check_checksum(manifest.buckets[number], held.bucket.checksum)
        except StagingError:
            held.close()
            raise
        return held

    buckets = _all_or_none(result(number, patch) for number, patch in enumerate(delta.buckets))
    moved = sum(patch.nbytes for patch in delta.buckets)
    return StagedWeights(manifest, buckets, codec="delta", moved=moved)


def _all_or_none(opening: Iterable[StagedBucket]) -> list[StagedBucket]:
    held: list[StagedBucket] = []
    try:
        for bucket in opening:
            held.append(bucket)  # noqa: PERF402  (a failure must find the others)
    except BaseException:
        for bucket in held:
            bucket.close()
        raise
    return held


def tensor_views(
    specs: Iterable[TensorSpec], memories: list[memoryview]
) -> Iterator[tuple[str, Tensor]]:
    """Names and zero-copy tensors over the memory of the buckets."""
    for spec in specs:
        dtype = DTYPES[spec.dtype]
        flat = torch.frombuffer(
            memories[spec.bucket],
            dtype=dtype,
            count=spec.nbytes // ITEM_BYTES[spec.dtype],
            offset=spec.offset,
        )
        yield spec.name, flat.view(spec.shape)

"""Staging: fetch and verify a version on this node, without touching an engine."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from weight_sync.buckets import Piece
from weight_sync.codecs.delta import patched
from weight_sync.errors import StagingError, WrongBase
from weight_sync.manifest import Bucket, Manifest, TensorSpec
from weight_sync.progress import Progress, run_in_streams
from weight_sync.transports.protocol import Transport
from weight_sync.transports.sealed_memory import SealedBucket, seal_verified

logger = logging.getLogger(__name__)


class StagedWeights:
    """All buckets of a version, verified and held open by this process."""

    def __init__(
        self, manifest: Manifest, buckets: Iterable[SealedBucket], *, codec: str, fetched: int
    ) -> None:
        self._buckets = tuple(buckets)
        self.manifest = replace(
            manifest, buckets=tuple(sealed.bucket for sealed in self._buckets), delta=None
        )
        """The manifest with locations of this process, valid until `close`."""
        self.codec = codec
        """Form in which the version was fetched: "full" or "delta"."""
        self.fetched = fetched
        """Bytes that were fetched."""

    @property
    def memories(self) -> list[memoryview]:
        """The bytes of every bucket."""
        return [sealed.memory for sealed in self._buckets]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors in the order of the manifest; views, not copies."""
        return tensor_views(self.manifest.tensors, self.memories)

    def close(self) -> None:
        """Release the buckets; tensors that still exist stay valid."""
        for sealed in self._buckets:
            sealed.close()


def stage(
    manifest: Manifest,
    transport: Transport,
    base: StagedWeights | None = None,
    progress: Progress | None = None,
) -> StagedWeights:
    """Fetch and verify a version, whole unless its delta on `base` can be used; blocks.

    Raises StagingError if a bucket is unavailable or damaged; then none is kept open.
    """
    delta = manifest.delta
    if delta and base is not None and base.manifest.version == delta.base_version:
        try:
            return stage_delta(manifest, transport, base, progress)
        except StagingError as error:
            logger.warning("version %d comes whole: %s", manifest.version, error)
    buckets = _open_all(transport.open, manifest.buckets, progress)
    return StagedWeights(manifest, buckets, codec="full", fetched=manifest.nbytes)


def stage_delta(
    manifest: Manifest, transport: Transport, base: StagedWeights, progress: Progress | None = None
) -> StagedWeights:
    """Build a version from its delta on another one; blocks.

    Raises WrongBase if the delta is not for `base`, and StagingError as `stage` does.
    """
    delta = manifest.delta
    if delta is None or len(delta.buckets) != len(base.manifest.buckets):
        raise WrongBase(f"version {manifest.version} has no delta for these weights")
    numbers = {patch: number for number, patch in enumerate(delta.buckets)}

    def apply(patch: Bucket) -> SealedBucket:
        number = numbers[patch]
        with closing(transport.open(patch)) as opened:
            old = np.frombuffer(base.memories[number], dtype=np.uint8)
            new = patched(old, base.manifest.buckets[number].checksum, opened.memory)
        return seal_verified(manifest.buckets[number], new.size, [Piece(0, new.data)])

    buckets = _open_all(apply, delta.buckets, progress)
    fetched = sum(patch.nbytes for patch in delta.buckets)
    return StagedWeights(manifest, buckets, codec="delta", fetched=fetched)


def _open_all(
    opening: Callable[[Bucket], SealedBucket], buckets: Sequence[Bucket], progress: Progress | None
) -> list[SealedBucket]:
    """Open several buckets at a time; all or none."""
    tasks = [partial(opening, bucket) for bucket in buckets]
    sizes = [bucket.nbytes for bucket in buckets]
    return run_in_streams(progress or Progress(0.0), "open", tasks, sizes, SealedBucket.close)


def tensor_views(
    specs: Iterable[TensorSpec], memories: list[memoryview]
) -> Iterator[tuple[str, Tensor]]:
    """Yield names and zero-copy tensors over the memory of the buckets."""
    for spec in specs:
        memory = memories[spec.bucket][spec.offset : spec.offset + spec.nbytes]
        flat = torch.frombuffer(memory, dtype=getattr(torch, spec.dtype))
        yield spec.name, flat.view(spec.shape)

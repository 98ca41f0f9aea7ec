"""Verified weights of one version on this node, ready to be loaded. No engine is touched here."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from weight_sync.manifest import ITEM_BYTES, Manifest, TensorSpec
from weight_sync.transport import StagedBucket, Transport

DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
"""Torch's dtype for every name that a manifest may carry."""


class StagedWeights:
    """All buckets of a version, verified and held open by this process."""

    def __init__(self, manifest: Manifest, buckets: Iterable[StagedBucket]) -> None:
        self._buckets = tuple(buckets)
        self.manifest = replace(manifest, buckets=tuple(held.bucket for held in self._buckets))
        """Its locations point to what this process holds, valid until `close`."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors in the order of the manifest; views, not copies."""
        return tensor_views(self.manifest.tensors, [held.memory for held in self._buckets])

    def close(self) -> None:
        """Gives the buckets back; tensors that still exist stay valid."""
        for held in self._buckets:
            held.close()


def stage(manifest: Manifest, transport: Transport) -> StagedWeights:
    """Opens and verifies every bucket of a version; blocks.

    Raises:
        StagingError: One bucket cannot be had or verified; none is held then.
    """
    held: list[StagedBucket] = []
    try:
        for bucket in manifest.buckets:
            held.append(transport.open(bucket))  # noqa: PERF401  (a failure must find the others)
        return StagedWeights(manifest, held)
    except BaseException:
        for bucket_held in held:
            bucket_held.close()
        raise


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

"""Buckets of tensors: the plan of which tensor lies where, and the bytes to be stored. No I/O."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from weight_sync.manifest import TensorSpec, tensor_bytes

ALIGNMENT = 64
"""Tensors start at multiples of this many bytes: a cache line, and every dtype's own alignment."""


class Piece(NamedTuple):
    """A contiguous part of a bucket."""

    offset: int
    """First byte inside the bucket."""
    memory: memoryview
    """One-dimensional bytes, which must not change until they are written."""
    tensor: TensorSpec | None = None
    """The tensor that the bytes hold; None for the output of a codec."""


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """The bucket and offset of every tensor."""

    tensors: tuple[TensorSpec, ...]
    sizes: tuple[int, ...]
    """Bytes of each bucket."""


def plan_buckets(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], bucket_bytes: int
) -> BucketPlan:
    """Fill buckets greedily and in order, so that the tensors of a layer stay together.

    Takes name, dtype and shape of each tensor. A tensor larger than `bucket_bytes` gets a bucket of
    its own. Raises ManifestError for a tensor whose dtype or shape cannot be sent.

    Example:
        >>> plan_buckets([("a", "float32", (3,)), ("b", "float32", (2,))], 4096).sizes
        (72,)
    """
    specs: list[TensorSpec] = []
    sizes: list[int] = []
    for name, dtype, shape in tensors:
        nbytes = tensor_bytes(name, dtype, shape)
        offset = -(-sizes[-1] // ALIGNMENT) * ALIGNMENT if sizes else 0
        if not sizes or offset + nbytes > bucket_bytes:
            sizes.append(0)
            offset = 0
        sizes[-1] = offset + nbytes
        bucket = len(sizes) - 1
        specs.append(TensorSpec(name=name, dtype=dtype, shape=shape, bucket=bucket, offset=offset))
    return BucketPlan(tuple(specs), tuple(sizes))

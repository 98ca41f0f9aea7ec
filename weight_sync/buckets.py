"""Plans which tensor lies where in which bucket. Pure: no bytes move here."""

from collections.abc import Iterable
from dataclasses import dataclass

from weight_sync.errors import ManifestError
from weight_sync.manifest import TensorSpec, tensor_bytes

ALIGNMENT = 64
"""Tensors start at multiples of this many bytes: a cache line, and every dtype's own alignment."""


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """Where every tensor goes."""

    tensors: tuple[TensorSpec, ...]
    sizes: tuple[int, ...]
    """Bytes of each bucket."""


def plan_buckets(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], bucket_bytes: int
) -> BucketPlan:
    """Fills buckets greedily and in order, so that a layer's tensors stay together.

    Args:
        tensors: Name, dtype and shape of each tensor.
        bucket_bytes: Largest bucket; a tensor that is larger gets one of its own.

    Returns:
        A plan that names every tensor once, in the order given.

    Raises:
        ManifestError: No tensors, a name twice, an unknown dtype, or a tensor without elements.

    Example:
        >>> plan_buckets([("a", "float32", (3,)), ("b", "float32", (2,))], 4096).sizes
        (72,)
    """
    specs: list[TensorSpec] = []
    sizes: list[int] = []
    names: set[str] = set()
    for name, dtype, shape in tensors:
        if name in names:
            raise ManifestError(f"tensor {name!r} is published twice in one version")
        names.add(name)
        nbytes = tensor_bytes(name, dtype, shape)
        offset = -(-sizes[-1] // ALIGNMENT) * ALIGNMENT if sizes else 0
        if not sizes or offset + nbytes > bucket_bytes:
            sizes.append(0)
            offset = 0
        sizes[-1] = offset + nbytes
        specs.append(
            TensorSpec(
                name=name,
                dtype=dtype,
                shape=shape,
                bucket=len(sizes) - 1,
                offset=offset,
                nbytes=nbytes,
            )
        )
    if not specs:
        raise ManifestError("there are no tensors to publish")
    return BucketPlan(tuple(specs), tuple(sizes))

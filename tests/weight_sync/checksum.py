"""The checksum of a version's weights: independent of the number of ranks and of the buckets."""

from collections.abc import Iterable

import xxhash
from torch import Tensor

from weight_sync.publish.snapshot import bytes_of


def checksum(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return xxh3_64 over each tensor's name and row-major bytes, as 16 hexadecimal digits."""
    digest = xxhash.xxh3_64()
    for name, tensor in tensors:
        digest.update(name.encode())
        digest.update(bytes_of(tensor.cpu().contiguous()))
    return digest.hexdigest()

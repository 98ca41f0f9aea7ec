"""One number for the weights of a version: equal where every bit of every tensor is.

Over the bytes as they travel and in the order in which they are published, so it is the same for
any number of ranks and any division into buckets. Leaves out the checksums that receivers verify,
which are of buckets (`manifest`).
"""

from collections.abc import Iterable

import torch
import xxhash
from torch import Tensor


def checksum(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """The checksum of weights.

    Args:
        tensors: Names and tensors in their order, of any device and layout.

    Returns:
        xxh3_64 of each tensor's name and row-major bytes in turn, as 16 hexadecimal digits.
    """
    digest = xxhash.xxh3_64()
    for name, tensor in tensors:
        digest.update(name.encode())
        digest.update(bytes_of(tensor.cpu().contiguous()))
    return digest.hexdigest()


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host; nothing is copied."""
    found: memoryview = tensor.detach().view(-1).view(torch.uint8).numpy().data
    return found

"""A copy of all weights in host memory that is used again and again.

Fresh memory costs several times the copy itself; memory that a GPU copies to is pinned. A tensor is
checksummed piece by piece while it is in the processor's cache. Leaves out when a snapshot may be
overwritten (`publisher`).
"""

from collections.abc import Iterable

import torch
import xxhash
from torch import Tensor

from weight_sync.config import WeightSyncConfig

PIECE_BYTES = 2**18
"""What is copied and then checksummed at a time: fits into the second-level cache of a core."""


def wire_dtype(config: WeightSyncConfig) -> torch.dtype | None:
    """What a recipe has tensors cast to; None: to nothing."""
    return torch.bfloat16 if config.wire_dtype == "bfloat16" else None


class Snapshot:
    """Host tensors of one version."""

    def __init__(self) -> None:
        self.tensors: list[tuple[str, Tensor]] = []
        """What was taken last: contiguous, in the order given."""
        self._memory: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, tensors: Iterable[tuple[str, Tensor]], wire_dtype: torch.dtype | None) -> str:
        """Copies tensors, cast to `wire_dtype` where there is one; their `checksum`."""
        self.tensors = []
        digest = xxhash.xxh3_64()
        later: list[tuple[str, Tensor]] = []
        for name, tensor in tensors:
            host = self._host(name, tensor, wire_dtype or tensor.dtype)
            self.tensors.append((name, host))
            if tensor.is_cuda:  # the device copies while the next tensor is gathered
                host.copy_(tensor, non_blocking=True)
                later.append((name, host))
                continue
            digest.update(name.encode())
            for target, source in _pieces(host, tensor):
                target.copy_(source)
                digest.update(_bytes(target))
        if later:
            torch.cuda.synchronize(device=None)
        for name, host in later:
            digest.update(name.encode())
            digest.update(_bytes(host))
        return digest.hexdigest()

    def _host(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        host = self._memory.get(name)
        if host is None or host.shape != tensor.shape or host.dtype != dtype:
            host = torch.empty(tensor.shape, dtype=dtype, device="cpu", pin_memory=tensor.is_cuda)
            self._memory[name] = host
        return host


def _pieces(host: Tensor, tensor: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """Matching parts of both; one, where the tensor is not in row-major order."""
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        return [(host, tensor)]
    step = PIECE_BYTES // host.element_size()
    target, source = host.reshape(-1), tensor.reshape(-1)
    starts = range(0, host.numel(), step)
    return ((target[start : start + step], source[start : start + step]) for start in starts)


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data

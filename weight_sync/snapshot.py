"""A copy of all weights in host memory that is used again and again.

Fresh memory costs several times the copy itself; memory that a GPU copies to is pinned. A thread
checksums one tensor while the next one is copied. Leaves out when a snapshot may be overwritten
(`publisher`).
"""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import xxhash
from torch import Tensor

from weight_sync.config import WeightSyncConfig


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
        with ThreadPoolExecutor(1, thread_name_prefix="checksum") as hashing:
            hashed: list[Future[None]] = []
            on_their_way = []
            for name, tensor in tensors:
                host = self._host(name, tensor, wire_dtype or tensor.dtype)
                host.copy_(tensor, non_blocking=tensor.is_cuda)
                self.tensors.append((name, host))
                if tensor.is_cuda:
                    on_their_way.append((name, host))
                else:
                    hashed.append(hashing.submit(_update, digest, name, host))
            if on_their_way:
                torch.cuda.synchronize(device=None)
                hashed += [hashing.submit(_update, digest, *sent) for sent in on_their_way]
            for future in hashed:
                future.result()
        return digest.hexdigest()

    def _host(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        host = self._memory.get(name)
        if host is None or host.shape != tensor.shape or host.dtype != dtype:
            host = torch.empty(tensor.shape, dtype=dtype, device="cpu", pin_memory=tensor.is_cuda)
            self._memory[name] = host
        return host


def _update(digest: xxhash.xxh3_64, name: str, tensor: Tensor) -> None:
    digest.update(name.encode())
    digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)

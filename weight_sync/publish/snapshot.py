"""A reusable copy of all weights in host memory.

Fresh memory would cost several times the copy itself. On a CPU the caller's thread copies pieces
while another thread checksums them. Torch's own threads are not used: where an engine occupies one
of their cores they wait for each other, ten times as long as the copy takes.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import xxhash
from torch import Tensor

from weight_sync.checksum import bytes_of, checksum
from weight_sync.config import WeightSyncConfig

PIECE_ELEMENTS = 2**22
"""Copied at a time: 16 MiB of float32, enough for stores that bypass the cache."""
CAST_ELEMENTS = 2**14
"""Cast at a time; torch would use all its threads for twice as many."""


def wire_dtype(config: WeightSyncConfig) -> torch.dtype | None:
    """Return the dtype that a recipe has tensors cast to; None casts nothing."""
    return torch.bfloat16 if config.wire_dtype == "bfloat16" else None


class Snapshot:
    """The tensors of one version in host memory."""

    def __init__(self) -> None:
        self.tensors: list[tuple[str, Tensor]] = []
        """The tensors taken last: contiguous, in the order given."""
        self._memory: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, tensors: Iterable[tuple[str, Tensor]], wire_dtype: torch.dtype | None) -> str:
        """Copy tensors, cast to `wire_dtype` if given, and return their `checksum`."""
        self.tensors = []
        digest = xxhash.xxh3_64()
        with ThreadPoolExecutor(1, thread_name_prefix="checksum") as thread:
            for name, tensor in tensors:
                host = self._host(name, tensor, wire_dtype or tensor.dtype)
                self.tensors.append((name, host))
                if tensor.is_cuda:
                    host.copy_(tensor, non_blocking=True)
                    continue
                thread.submit(digest.update, name.encode())
                for copied in _copy(tensor, host):
                    thread.submit(digest.update, copied)
        if any(host.is_pinned() for _, host in self.tensors):
            torch.cuda.synchronize(device=None)
            return checksum(self.tensors)
        return digest.hexdigest()

    def _host(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        host = self._memory.get(name)
        if host is None or host.shape != tensor.shape or host.dtype != dtype:
            host = torch.empty(tensor.shape, dtype=dtype, device="cpu", pin_memory=tensor.is_cuda)
            self._memory[name] = host
        return host


def _copy(tensor: Tensor, host: Tensor) -> Iterator[memoryview]:
    """Copy a tensor of host memory; yield its bytes as they are copied."""
    data = bytes_of(host)
    if not tensor.is_contiguous():
        host.copy_(tensor)
        yield data
        return
    source, target, casts = tensor.view(-1), host.view(-1), tensor.dtype != host.dtype
    length = CAST_ELEMENTS if casts else PIECE_ELEMENTS
    for begin in range(0, target.numel(), length):
        end = begin + length
        piece = data[begin * target.element_size() : end * target.element_size()]
        if casts:
            target[begin:end].copy_(source[begin:end])
        else:
            np.copyto(np.asarray(piece), np.asarray(bytes_of(source[begin:end])))
        yield piece

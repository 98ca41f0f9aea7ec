"""A copy of all weights in host memory that is used again and again.

Fresh memory costs several times the copy itself; memory that a GPU copies to is pinned. On a CPU
the caller's thread copies piece by piece, and another one checksums what was copied: torch's own
threads would wait for each other wherever an engine has one of their cores, ten times as long as
the copy takes. Leaves out when a snapshot may be overwritten (`publisher`).
"""

import threading
from collections.abc import Iterable, Iterator
from queue import SimpleQueue
from typing import Self

import numpy as np
import torch
import xxhash
from torch import Tensor

from weight_sync.checksum import bytes_of, checksum
from weight_sync.config import WeightSyncConfig

PIECE_ELEMENTS = 2**22
"""Copied at a time: 16 MiB of float32, so much that the copy does not fetch what it overwrites."""
CAST_ELEMENTS = 2**14
"""Cast at a time; torch casts twice as many with all its threads."""


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
        with _Checksum() as taken:
            for name, tensor in tensors:
                host = self._host(name, tensor, wire_dtype or tensor.dtype)
                self.tensors.append((name, host))
                if tensor.is_cuda:
                    host.copy_(tensor, non_blocking=True)
                    continue
                taken.add(name.encode())
                for copied in _copy(tensor, host):
                    taken.add(copied)
        if any(host.is_pinned() for _, host in self.tensors):
            torch.cuda.synchronize(device=None)
            return checksum(self.tensors)
        return taken.hexdigest()

    def _host(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        host = self._memory.get(name)
        if host is None or host.shape != tensor.shape or host.dtype != dtype:
            host = torch.empty(tensor.shape, dtype=dtype, device="cpu", pin_memory=tensor.is_cuda)
            self._memory[name] = host
        return host


class _Checksum:
    """A thread that digests what it is given, in order."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_64()
        self._given: SimpleQueue[bytes | memoryview | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="checksum", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._given.put(None)
        self._thread.join()

    def add(self, data: bytes | memoryview) -> None:
        """Takes bytes that must not change before the end."""
        self._given.put(data)

    def hexdigest(self) -> str:
        """The checksum, after the end."""
        return self._digest.hexdigest()

    def _run(self) -> None:
        while (data := self._given.get()) is not None:
            self._digest.update(data)


def _copy(tensor: Tensor, host: Tensor) -> Iterator[memoryview]:
    """Copies a tensor of host memory; yields its bytes as they are there."""
    data = bytes_of(host)
    if not tensor.is_contiguous():
        host.copy_(tensor)
        yield data
        return
    source, target = tensor.view(-1), host.view(-1)
    if source.dtype == target.dtype:
        origin = bytes_of(tensor)
        length = PIECE_ELEMENTS * target.element_size()
        for begin in range(0, data.nbytes, length):
            piece = slice(begin, begin + length)
            np.copyto(np.asarray(data[piece]), np.asarray(origin[piece]))
            yield data[piece]
        return
    for begin in range(0, target.numel(), CAST_ELEMENTS):
        end = begin + CAST_ELEMENTS
        target[begin:end].copy_(source[begin:end])
        yield data[begin * target.element_size() : end * target.element_size()]

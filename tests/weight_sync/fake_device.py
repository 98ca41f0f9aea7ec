"""Memory of a device that lies in the host's, for code that is a GPU's but for its copies."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import torch
from torch import Tensor

from weight_sync.vllm import device_memory
from weight_sync.vllm.device_memory import DeviceMemory, ThroughChunks


class FakeDeviceMemory(DeviceMemory):
    """Counts blocks, chunks, bytes that each filling sent, and copies."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), shared=False)
        self.blocks: list[int] = []
        self.filled: list[int] = []
        self.chunks = self.copies = 0

    def allocate(self, nbytes: int) -> Tensor:
        self.blocks.append(nbytes)
        return torch.zeros(nbytes, dtype=torch.uint8)

    @contextmanager
    def filling(self) -> Iterator[None]:
        self.filled.append(0)
        with ThroughChunks(self):
            yield

    def crosses(self, target: Tensor, source: Tensor) -> bool:
        return self._holds(target) and not self._holds(source)

    def _holds(self, tensor: Tensor) -> bool:
        return (
            not tensor.is_meta
            and self._block is not None
            and tensor.untyped_storage().data_ptr() == self._block.data_ptr()
        )

    def fill(self, target: Tensor, source: Tensor) -> None:
        before = self.filled[-1]
        super().fill(target, source)
        self.filled[-1] = before + target.nbytes  # of its rows, too

    def chunk(self) -> tuple[Tensor, Any]:
        self.chunks += 1
        return torch.empty(device_memory.CHUNK_BYTES, dtype=torch.uint8), Mock()

    def copy(self, targets: list[Tensor], staged: list[Tensor]) -> None:
        self.copies += 1
        torch._foreach_copy_(targets, staged)

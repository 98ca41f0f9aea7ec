"""Memory for a second set of weights near a GPU, from which it is copied while the engine pauses.

Captured graphs hold the addresses of the weights, so references cannot be exchanged as on a CPU.
"""

from itertools import accumulate

import torch
from torch import Tensor

from weight_sync.buckets import ALIGNMENT
from weight_sync.publish.snapshot import Gpu

SPARE_BYTES = 2**30
"""Free memory of the device that is left for the engine."""


def stages_on_device(nbytes: float, free: float, *, shared: bool) -> bool:
    """Return True if staged weights of so many bytes lie on a GPU with `free` bytes.

    On a GPU that is shared they never do: what is free there is another process's to come.
    """
    return not shared and free >= nbytes + SPARE_BYTES


class DeviceMemory:
    """One block for the staged weights: on the device if it may, else pinned on the host."""

    def __init__(self, device: torch.device, *, shared: bool) -> None:
        self._device, self._shared = device, shared
        self._block: Tensor | None = None

    def stage(self, tensors: list[Tensor]) -> list[Tensor]:
        """Copy tensors to the block, replacing what was staged before; blocks."""
        sizes = (-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors)
        *offsets, nbytes = accumulate(sizes, initial=0)
        if self._block is None or self._block.nbytes < nbytes:
            self._block = self.allocate(nbytes)
        staged = [
            self._block[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for offset, tensor in zip(offsets, tensors, strict=True)
        ]
        self.fill(staged, tensors)
        return staged

    def allocate(self, nbytes: int) -> Tensor:
        """Return the block; it is kept for all versions."""
        with torch.cuda.device(self._device):
            if stages_on_device(nbytes, torch.cuda.mem_get_info()[0], shared=self._shared):
                return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            return Gpu().pinned(nbytes)

    def fill(self, staged: list[Tensor], tensors: list[Tensor]) -> None:
        """Copy on a stream of its own, beside the engine's."""
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        # Memory of the block may still be read by earlier work of the engine.
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for target, tensor in zip(staged, tensors, strict=True):
                target.copy_(tensor, non_blocking=True)
        stream.synchronize()

    def copy(self, targets: list[Tensor], staged: list[Tensor]) -> None:
        """Copy staged tensors into the served ones; return once they are in place."""
        torch._foreach_copy_(targets, staged, non_blocking=True)
        torch.cuda.current_stream(self._device).synchronize()

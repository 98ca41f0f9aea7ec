"""Memory for a second set of weights near a GPU, from which it is copied while the engine pauses.

Captured graphs hold the addresses of the weights, so references cannot be exchanged as on a CPU.

    loader ─copy_─▶ two pinned chunks, in turn ─side stream─▶ slot in the block    engine generates
    block ─▶ served weights                                                        engine paused
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, cycle
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from weight_sync.buckets import ALIGNMENT
from weight_sync.publish.snapshot import Gpu

SPARE_BYTES = 2**30
"""Free memory of the device that is left for the engine."""
CHUNK_BYTES = 16 * 2**20
"""Size of a chunk of pinned memory, through which weights go to the device."""


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
        self._chunks: Iterator[tuple[Tensor, Any]] | None = None
        """Chunks in turn, each with the event of the copy that read it last."""

    def slots(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return places in the block for tensors like these; later calls may return the same."""
        sizes = (-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors)
        *offsets, nbytes = accumulate(sizes, initial=0)
        if self._block is None or self._block.nbytes < nbytes:
            self._block = self.allocate(nbytes)
        return [
            self._block[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for offset, tensor in zip(offsets, tensors, strict=True)
        ]

    def allocate(self, nbytes: int) -> Tensor:
        """Return the block; it is kept for all versions."""
        with torch.cuda.device(self._device):
            if stages_on_device(nbytes, torch.cuda.mem_get_info()[0], shared=self._shared):
                return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            return Gpu().pinned(nbytes)

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Have this thread's `Tensor.copy_` fill slots beside the engine meanwhile."""
        stream: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        # Memory of the block may still be read by earlier work of the engine.
        stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(stream), ThroughChunks(self):
                yield
        finally:
            stream.synchronize()

    def crosses(self, target: Tensor, source: Tensor) -> bool:
        """Return True if a copy goes from the host to the device."""
        return target.is_cuda and source.device.type == "cpu"

    def fill(self, target: Tensor, source: Tensor) -> None:
        """Begin to copy from the host to a part of the block, cast to its dtype; reads `source`."""
        source = source.expand_as(target)
        if not target.ndim:
            target, source = target.view(1), source.view(1)
        if not target.numel():
            return
        rows = CHUNK_BYTES * len(target) // target.nbytes
        if not rows:
            for row, values in zip(target, source, strict=True):
                self.fill(row, values)
            return
        if self._chunks is None:
            self._chunks = cycle([self.chunk(), self.chunk()])
        for begin in range(0, len(target), rows):
            part, (chunk, copied) = target[begin : begin + rows], next(self._chunks)
            copied.synchronize()
            host = chunk[: part.nbytes].view(part.dtype).view(part.shape)
            host.copy_(source[begin : begin + rows])
            part.copy_(host, non_blocking=True)
            copied.record()

    def chunk(self) -> tuple[Tensor, Any]:
        """Return pinned memory, and an event that nothing waits for yet."""
        return Gpu().pinned(CHUNK_BYTES), torch.cuda.Event()  # type: ignore[no-untyped-call]

    def copy(self, targets: list[Tensor], staged: list[Tensor]) -> None:
        """Copy staged tensors into the served ones; return once they are in place."""
        torch._foreach_copy_(targets, staged, non_blocking=True)
        torch.cuda.current_stream(self._device).synchronize()


class ThroughChunks(TorchFunctionMode):
    """Sends copies of this thread from the host to a device through its memory's chunks."""

    def __init__(self, memory: DeviceMemory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.copy_ and self._memory.crosses(args[0], args[1]):
            self._memory.fill(args[0], args[1])
            return args[0]
        return func(*args, **(kwargs or {}))

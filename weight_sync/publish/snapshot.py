"""A reusable copy of all weights in host memory, or on the GPU that they are on.

Fresh memory would cost several times the copy itself. The caller's thread copies, from a GPU on its
current stream, while another thread checksums what has arrived. Torch's own threads are not used on
a CPU: where an engine occupies one of their cores they wait for each other.
"""

import logging
import mmap
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from weight_sync.adapter import KEPT
from weight_sync.buckets import ALIGNMENT
from weight_sync.config import WeightSyncConfig

log = logging.getLogger(__name__)

BLOCK_BYTES = 256 * 2**20
"""Size of a block of memory that is registered with a GPU; a larger tensor has its own."""
PIECE_ELEMENTS = 2**22
"""Copied at a time: 16 MiB of float32, enough for stores that bypass the cache."""
CHUNK_BYTES = 16 * 2**20
"""Read at a time from a copy on a GPU."""
CAST_ELEMENTS = 2**14
"""Cast at a time; torch would use all its threads for twice as many."""


def wire_dtype(config: WeightSyncConfig) -> torch.dtype | None:
    """Return the dtype that a recipe has tensors cast to; None casts nothing."""
    return torch.bfloat16 if config.wire_dtype == "bfloat16" else None


class Gpu:
    """Copies from CUDA devices to memory of the host that is registered with them."""

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []
        self._stream: Any = None

    def holds(self, tensor: Tensor) -> bool:
        """Return True if a tensor is on such a device."""
        return tensor.is_cuda

    def pinned(self, nbytes: int) -> Tensor:
        """Return bytes of the host; torch's own pinned memory takes the next power of two."""
        memory = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        self.register(memory)
        return memory

    def register(self, memory: Tensor) -> None:
        """Let the device write to memory directly; without this, copies are slower."""
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 1))
        if error:
            log.warning("%d bytes cannot be pinned: CUDA error %d", memory.nbytes, error)
        else:
            weakref.finalize(memory, runtime.cudaHostUnregister, memory.data_ptr())

    def copy(self, tensor: Tensor, host: Tensor) -> Callable[[], object]:
        """Begin a copy on the current stream, to the host or on the device; return its wait."""
        # The device casts: torch would copy another dtype to fresh memory that is not pinned first.
        host.copy_(tensor.to(host.dtype), non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        return copied.synchronize

    def read(self, tensor: Tensor) -> Iterator[memoryview]:
        """Yield the bytes of a contiguous tensor, each part until the next, beside other work."""
        if not self._chunks:
            self._chunks = [self.pinned(CHUNK_BYTES) for _ in range(2)]
            self._stream = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
        arriving: list[Tensor] = []
        flat, chunks = tensor.view(-1).view(torch.uint8), cycle(self._chunks)
        for begin in range(0, flat.nbytes, CHUNK_BYTES):
            part = flat[begin : begin + CHUNK_BYTES]
            self._stream.synchronize()
            with torch.cuda.stream(self._stream):
                arriving.append(next(chunks)[: part.nbytes].copy_(part, non_blocking=True))
            if len(arriving) > 1:
                yield bytes_of(arriving.pop(0))
        self._stream.synchronize()
        for last in arriving:
            yield bytes_of(last)


class _Checksum:
    """The xxh3_64 of parts in their order, computed in a thread if it is wanted."""

    def __init__(self, *, wanted: bool) -> None:
        self._digest, self._wanted = xxhash.xxh3_64(), wanted
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checksum")
        self._error: Exception | None = None

    def update(self, part: bytes | memoryview) -> None:
        """Add a part, which must stay as it is until the end."""
        self.then(self._digest.update, part)

    def update_from(self, parts: Callable[[], Iterable[memoryview]]) -> None:
        """Add parts, each of which must stay as it is until the next."""

        def update() -> None:
            for part in parts():
                self._digest.update(part)

        self.then(update)

    def then(self, step: Callable[..., object], *arguments: Any) -> None:
        """Take a step in the thread, after those before."""
        if self._wanted:
            self._thread.submit(self._run, step, *arguments)

    def end(self) -> Future[str]:
        """Return the checksum to come, which fails with the first error of a step."""
        result = self._thread.submit(self._result)
        self._thread.shutdown(wait=False)
        return result

    def _run(self, step: Callable[..., object], *arguments: Any) -> None:
        try:
            step(*arguments)
        except Exception as error:  # noqa: BLE001  (raised by `_result`)
            self._error = self._error or error

    def _result(self) -> str:
        if self._error is not None:
            raise self._error
        return self._digest.hexdigest()


class Snapshot:
    """The tensors of one version, in host memory or, with `on_device`, on the GPU that has them."""

    def __init__(self, gpu: Gpu | None = None, *, on_device: bool = False) -> None:
        self.on_device = on_device
        self.tensors: list[tuple[str, Tensor]] = []
        """The tensors taken last: contiguous, in the order given."""
        self._memory: dict[str, Tensor] = {}
        self._gpu = gpu or Gpu()
        self._blocks: list[Tensor] = []
        """Registered memory."""
        self._used = 0
        """Bytes of the newest block that are taken."""
        self._digest: Future[str] | None = None
        """The checksum of the tensors taken last, which reads their memory."""

    @torch.no_grad()
    def take(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        wire_dtype: torch.dtype | None,
        *,
        checksummed: bool = True,
    ) -> Future[str]:
        """Copy tensors, all but `KEPT` ones cast to `wire_dtype` if given.

        Returns their checksum to come, xxh3_64 over each tensor's name and row-major bytes, of none
        without `checksummed`. It fails with the first error of what it is computed from. The next
        call waits for it, and raises that error.
        """
        if self._digest is not None:
            self._digest.result()
        self.tensors = []
        copies: list[Callable[[], object]] = []
        checksum = _Checksum(wanted=checksummed)
        try:
            for name, tensor in tensors:
                cast = wire_dtype if not name.endswith(KEPT) else None
                host = self._host(name, tensor, cast or tensor.dtype)
                self.tensors.append((name, host))
                checksum.update(name.encode())
                if self._gpu.holds(tensor):
                    copies.append(self._gpu.copy(tensor, host))
                    checksum.then(copies[-1])
                    if self.on_device:
                        checksum.update_from(partial(self._gpu.read, host))
                    else:
                        checksum.update(bytes_of(host))
                    continue
                for piece in _copy(tensor, host):
                    checksum.update(piece)
            for wait in copies[-1:]:  # they are in the order of a stream
                wait()
        finally:
            self._digest = checksum.end()
        return self._digest

    def _host(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        host = self._memory.get(name)
        if host is None or host.shape != tensor.shape or host.dtype != dtype:
            if self.on_device:
                host = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
            elif self._gpu.holds(tensor):
                host = self._pinned(tensor.numel() * dtype.itemsize).view(dtype).view(tensor.shape)
            else:
                host = torch.empty(tensor.shape, dtype=dtype, device="cpu")
            self._memory[name] = host
        return host

    def _pinned(self, nbytes: int) -> Tensor:
        begin = -(-self._used // ALIGNMENT) * ALIGNMENT
        if not self._blocks or begin + nbytes > self._blocks[-1].nbytes:
            self._blocks.append(self._gpu.pinned(max(nbytes, BLOCK_BYTES)))
            begin = 0
        self._used = begin + nbytes
        return self._blocks[-1][begin : self._used]


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host; nothing is copied."""
    data: memoryview = tensor.detach().view(-1).view(torch.uint8).numpy().data
    return data


def _copy(tensor: Tensor, host: Tensor) -> Iterator[memoryview]:
    """Copy a tensor of host memory in pieces; yield its bytes as they are copied."""
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
        else:  # without torch's threads
            np.copyto(np.asarray(piece), np.asarray(bytes_of(source[begin:end])))
        yield piece

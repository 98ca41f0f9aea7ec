"""Copies of tensors in host memory, from which they are written while training goes on."""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from weight_sync.publish.snapshot import Snapshot


class HostCopy:
    """Host memory for the same tensors again and again; it stays allocated between two copies."""

    def __init__(self) -> None:
        self._snapshot = Snapshot()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="capture")

    def take(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Return copies by name, of tensors each of which is valid until the next."""
        self._snapshot.take(tensors, None, checksummed=False)
        return dict(self._snapshot.tensors)

    def begin(self, tensors: Iterable[tuple[str, Tensor]]) -> Future[dict[str, Tensor]]:
        """Begin to copy tensors in a thread, beside what a GPU computes.

        They must stay as they are until the future has the copies, by name. Tensors with the same
        elements in memory share a copy.
        """
        places: dict[tuple[int, int], str] = {}
        first: dict[str, tuple[str, Tensor]] = {}
        for name, tensor in tensors:
            place = places.setdefault((tensor.data_ptr(), tensor.nbytes), name)
            first[name] = place, tensor
        stream = None
        if torch.cuda.is_available():
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())

        def copy() -> dict[str, Tensor]:
            with torch.cuda.stream(stream):
                copies = self.take((name, first[name][1]) for name in places.values())
            return {
                name: copies[place].view(tensor.shape) for name, (place, tensor) in first.items()
            }

        return self._thread.submit(copy)

"""Copies of tensors in host memory, from which they are written while training goes on."""

from collections.abc import Iterable

from torch import Tensor

from weight_sync.publish.snapshot import Snapshot


class HostCopy:
    """Host memory for the same tensors again and again; it stays allocated between two copies."""

    def __init__(self) -> None:
        self._snapshot = Snapshot()

    def take(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Return copies by name, of tensors each of which is valid until the next."""
        self._snapshot.take(tensors, None, checksummed=False)
        return dict(self._snapshot.tensors)

    def take_lasting(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Return copies by name; tensors that have the same elements in memory share one."""
        places: dict[tuple[int, int], str] = {}
        first: dict[str, tuple[str, Tensor]] = {}
        for name, tensor in tensors:
            place = places.setdefault((tensor.data_ptr(), tensor.nbytes), name)
            first[name] = place, tensor
        self._snapshot.take_lasting((name, first[name][1]) for name in places.values())
        copies = dict(self._snapshot.tensors)
        return {name: copies[place].view(tensor.shape) for name, (place, tensor) in first.items()}

"""Records of sums over tokens, which add up over microbatches, optimizer steps and ranks."""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor


class Sums:
    """Base of frozen dataclasses whose fields are tensors, or None, mappings or `Sums` of them.

    Two records of one kind add up field by field, in float64.
    """

    def __add__(self, other: Self) -> Self:
        added: Self = _combined(torch.add, _wide(self), _wide(other))
        return added

    def over_ranks(self, total: Callable[[Tensor], Tensor]) -> Self:
        """Return the sums over all ranks, on the CPU, with one collective call and one transfer.

        `total` returns the sum of a tensor [n] over ranks. Every rank has the same fields.
        """
        wide, leaves = _wide(self), list[Tensor]()
        _combined(leaves.append, wide)
        flat = total(torch.cat([leaf.reshape(-1) for leaf in leaves])).cpu()
        parts = iter(torch.split(flat, [leaf.numel() for leaf in leaves]))
        reduced: Self = _combined(lambda leaf: next(parts).view(leaf.shape), wide)
        return reduced


def _wide(sums: Sums) -> Any:
    return _combined(lambda tensor: tensor.detach().double(), sums)


def _combined(combine: Callable[..., Any], *records: Any) -> Any:
    """Apply a function to the tensors at one place of several records of one form."""
    first = records[0]
    if isinstance(first, Tensor):
        return combine(*records)
    if isinstance(first, Mapping):
        columns = {key: [record[key] for record in records] for key in first}
        return {key: _combined(combine, *column) for key, column in columns.items()}
    if is_dataclass(first) and not isinstance(first, type):
        names = [item.name for item in fields(first)]
        columns = {name: [getattr(record, name) for record in records] for name in names}
        return replace(first, **{n: _combined(combine, *column) for n, column in columns.items()})
    return first

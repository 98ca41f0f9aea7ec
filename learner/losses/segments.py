"""Sums and means over the tokens of a sequence or group."""

import torch
from torch import Tensor


class Segments:
    """The tokens of a microbatch by an id they share.

    Example:
        >>> Segments(torch.tensor([7, 7, 2])).totals(torch.tensor([1.0, 2.0, 5.0])).tolist()
        [3.0, 3.0, 5.0]
    """

    def __init__(self, ids: Tensor) -> None:
        """`ids` is [N] integers, in any order."""
        values, self.index = torch.unique(ids, return_inverse=True)
        self.count = len(values)

    def sums(self, values: Tensor) -> Tensor:
        """Return the sum of `values` [N] over each segment, [segments] float64."""
        zeros = values.new_zeros(self.count, dtype=torch.float64)
        return zeros.index_add(0, self.index, values.double())

    def totals(self, values: Tensor) -> Tensor:
        """Return for each token the sum of `values` [N] over its segment, [N] float64."""
        return self.sums(values)[self.index]

    def means(self, values: Tensor, chosen: Tensor) -> Tensor:
        """Return for each token the mean of `values` over the `chosen` tokens of its segment.

        Of shape [N] float64; 0 where a segment has no chosen token.
        """
        total = self.totals(torch.where(chosen, values, 0.0))
        return total / self.totals(chosen).clamp(min=1)

"""Whitening over all tokens of a batch."""

import torch
from torch import Tensor

from learner.advantages.grouped import all_tied

EPSILON = 1e-8
"""Added to the variance, under the root."""
NO_VARIANCE = 1e-12
"""Variance below which values are only centred."""


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """(x − mean) / √(var + 1e-8) over the masked-in tokens of the whole batch, [N] float64.

    The variance is Bessel's. Exactly 0 where `mask` [N] is false, all values are equal, or there is
    only one.
    """
    whitened = torch.zeros_like(values, dtype=torch.float64)
    chosen = values[mask].double()
    if all_tied(chosen):
        return whitened
    centred, variance = chosen - chosen.mean(), chosen.var()
    scale = torch.where(variance < NO_VARIANCE, 1.0, (variance + EPSILON).rsqrt())
    whitened[mask] = centred * scale
    return whitened

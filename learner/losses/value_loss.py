"""The loss of a critic, and the share of the returns that it explains, on packed tokens [N]."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from headway.errors import InputError
from learner.advantages.grouped import check_shapes
from learner.sums import Sums


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None = None
) -> Tensor:
    """½·max((V − ret)², (V_old + clamp(V − V_old, ±clip) − ret)²) per token, minimised.

    The clipped form is that of the PPO reference code; without `clip` the first term alone.

    Args:
        values: [N] floating, with gradient.
        old_values: [N] from before the batch's first step, which `returns` were computed with.
        returns: [N] as from `gae`.
        clip: Largest change of a value that is still rewarded, or None.

    Returns:
        [N], at least float32; no reduction inside.

    Raises:
        InputError: Shapes that differ, or `clip` is not positive.
    """
    columns = {"old_values": old_values, "returns": returns}
    check_shapes(columns, "[N] like values", values)
    if clip is not None and not clip > 0:
        raise InputError(f"clip of the value loss must be positive or None, found {clip}")
    dtype = torch.promote_types(values.dtype, torch.float32)
    new, old, target = values.to(dtype), old_values.detach().to(dtype), returns.detach().to(dtype)
    squared = (new - target).square()
    if clip is not None:
        near = old + (new - old).clamp(-clip, clip)
        squared = torch.maximum(squared, (near - target).square())
    return 0.5 * squared


@dataclass(frozen=True, kw_only=True)
class CriticSums(Sums):
    """Sums over the masked-in tokens of a critic, each a scalar; error: return − value."""

    loss: Tensor  # Σ token weights · loss: over a whole minibatch, its mean
    tokens: Tensor
    returns: Tensor
    returns_squared: Tensor
    errors: Tensor
    errors_squared: Tensor

    @classmethod
    def of(cls, loss: Tensor, values: Tensor, returns: Tensor, mask: Tensor) -> Self:
        """Sum over tokens: `values`, `returns` [N], `mask` [N] bool; `loss` is summed already."""
        target = returns.detach()[mask].double()
        error = target - values.detach()[mask].double()
        return cls(
            loss=loss.detach(),
            tokens=mask.sum(),
            returns=target.sum(),
            returns_squared=target.square().sum(),
            errors=error.sum(),
            errors_squared=error.square().sum(),
        )

    @property
    def explained_variance(self) -> float | None:
        """1 − Var(return − value) / Var(return).

        1 is a perfect critic, 0 one that has learnt the mean; None where the returns do not vary.
        """
        count = float(self.tokens)
        if not count:
            return None
        square = float(self.returns_squared) / count
        variance = square - (float(self.returns) / count) ** 2
        unexplained = float(self.errors_squared) / count - (float(self.errors) / count) ** 2
        # Below this the difference of the two large numbers is rounding.
        return None if variance <= 1e-12 * square else 1 - unexplained / variance

"""Corrections by the ratio of each token, ρ_t = proximal / behaviour.

Biased for the objective over sequences, and of low variance.
"""

from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from learner.config.option_types import Positive
from learner.corrections.importance_weights import Correction, kept, outside_band, unweighted
from learner.losses.loss_inputs import LossInputs


def none(inputs: LossInputs) -> Correction:
    """Every token counts once."""
    return Correction(unweighted(inputs), kept(inputs), {})


def tis(
    inputs: LossInputs,
    *,
    cap: Positive = 2.0,
    lag_caps: Annotated[Sequence[Positive], Field(min_length=1)] | None = None,
) -> Correction:
    """Truncate importance weights: min(ρ_t, cap).

    Source: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
    training". `lag_caps` are used instead of `cap` for tokens of lag 0, 1, …; the last is for all
    larger lags.

    Stats count tokens: `truncated`.
    """
    ratio = inputs.behavior_log_ratio.exp()
    largest = torch.full_like(ratio, cap) if lag_caps is None else _by_lag(inputs, lag_caps, ratio)
    truncated = (inputs.trained & (ratio > largest)).sum()
    weights = torch.where(inputs.trained, torch.minimum(ratio, largest), 1.0)
    return Correction(weights, kept(inputs), {"truncated": truncated})


def mis(inputs: LossInputs, *, low: float = 0.0, high: float = 2.0) -> Correction:
    """Masked importance sampling: ρ_t where low ≤ ρ_t ≤ high, else 0.

    Source: Liu et al. 2025, "When speed kills stability: demystifying RL collapse from the
    training-inference mismatch"; bounded above only, unless `low` says otherwise.

    Stats count tokens: `masked`.
    """
    return _banded(inputs, "mis", low, high, "masked")


def icepop(inputs: LossInputs, *, low: float = 0.5, high: float = 5.0) -> Correction:
    """IcePop: ρ_t where low ≤ ρ_t ≤ high, else 0; bounded on both sides.

    Source: arXiv 2510.18855, whose reference bounds are 0.5 and 5.

    Stats count tokens: `popped`.
    """
    return _banded(inputs, "icepop", low, high, "popped")


def _banded(inputs: LossInputs, name: str, low: float, high: float, stat: str) -> Correction:
    ratio = inputs.behavior_log_ratio.exp()
    rejected = outside_band(inputs, ratio, name, low, high)
    weights = torch.where(rejected, 0.0, ratio)
    return Correction(weights, ~rejected, {stat: rejected.sum()})


def _by_lag(inputs: LossInputs, caps: Sequence[float], like: Tensor) -> Tensor:
    lags = inputs.lags("tis with lag_caps")
    table = torch.tensor(caps, dtype=like.dtype, device=like.device)
    return table[lags.clamp(max=len(caps) - 1)]

"""Corrections by the ratio of whole sequences: of a rollout, over all paths of its history.

The product of all token ratios is unbiased for the objective over sequences, and its variance
explodes with their length; the geometric mean is neither, and only used to reject.
"""

import torch
from torch import Tensor

from learner.config.option_types import Positive
from learner.corrections.importance_weights import Correction, kept, outside_band, unweighted
from learner.losses.loss_inputs import LossInputs, bounded, count_outside


def sequence_tis(inputs: LossInputs, *, cap: Positive = 2.0) -> Correction:
    """min(ρ, cap) on every token of a sequence, ρ = Π_t proximal / behaviour.

    Stats count tokens: `sequence_truncated`, `sequence_bounded` (|Σ log-ratio| above 20).
    """
    ratio, outside = _product(inputs)
    truncated = inputs.trained & (ratio > cap)
    weights = torch.where(inputs.trained, ratio.clamp(max=cap), 1.0)
    stats = {"sequence_truncated": truncated.sum(), "sequence_bounded": outside}
    return Correction(weights, kept(inputs), stats)


def sequence_mis(inputs: LossInputs, *, low: float = 0.0, high: float = 3.0) -> Correction:
    """ρ on every token of a sequence where low ≤ ρ ≤ high, else 0; ρ = Π_t proximal / behaviour.

    Stats count tokens: `sequence_masked`, `sequence_bounded` (|Σ log-ratio| above 20).
    """
    ratio, outside = _product(inputs)
    rejected = outside_band(inputs, ratio, "sequence_mis", low, high)
    weights = torch.where(inputs.trained & ~rejected, ratio, 1.0).masked_fill(rejected, 0.0)
    stats = {"sequence_masked": rejected.sum(), "sequence_bounded": outside}
    return Correction(weights, ~rejected, stats)


def geometric_mis(inputs: LossInputs, *, low: float = 0.999, high: float = 1.002) -> Correction:
    """Reject a sequence unless low ≤ exp(mean_t log ρ_t) ≤ high; weigh by 1.

    Stats count tokens: `geometric_rejected`.
    """
    mean = inputs.sequences.means(inputs.raw_behavior_log_ratio, inputs.trained)
    rejected = outside_band(inputs, bounded(mean).exp(), "geometric_mis", low, high)
    return Correction(unweighted(inputs), ~rejected, {"geometric_rejected": rejected.sum()})


def _product(inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """Return the bounded product of ratios of each sequence, [N], and a count of bounded tokens."""
    log_ratio = inputs.sequences.totals(inputs.raw_behavior_log_ratio)
    ratio = bounded(log_ratio).exp().to(inputs.raw_behavior_log_ratio.dtype)
    return ratio, count_outside(log_ratio, inputs.trained)

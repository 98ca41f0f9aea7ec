"""TOPR: plain likelihood of positives, tapered weights of negatives.

Le Roux et al. 2025 (arXiv 2503.14286, eq. 8). Made for stale rollouts: its ratio is to the
behaviour policy always.
"""

from typing import Literal

import torch

from learner.losses.loss_inputs import LossInputs, TokenLoss, bounded, count_outside


def topr(inputs: LossInputs, *, level: Literal["sequence", "token"] = "sequence") -> TokenLoss:
    """ℓ_t = −w · A · log π(y_t), w = 1 where A ≥ 0, else sg(min(current / behaviour, 1)).

    At `level` "sequence" (the paper) the ratio is the product over all trained tokens of the
    sequence, at "token" each token's own.

    Stats count tokens with A < 0: `tapered` (weight below 1/2), `capped` (ratio above 1),
    `ratio_bounded` (log-ratio beyond ± 20).
    """
    log_ratio = inputs.raw_full_log_ratio.detach()
    if level == "sequence":
        log_ratio = inputs.sequences.totals(log_ratio).to(log_ratio.dtype)
    ratio = bounded(log_ratio).exp()
    negative = inputs.trained & (inputs.gains < 0)
    weight = torch.where(negative, ratio.clamp(max=1), 1.0)
    stats = {
        "tapered": (negative & (ratio < 0.5)).sum(),
        "capped": (negative & (ratio > 1)).sum(),
        "ratio_bounded": count_outside(log_ratio, negative),
    }
    return TokenLoss(-weight * inputs.gains * inputs.current, stats)

"""Kimi's policy optimisation: the advantage, and a square that keeps the policy near the sampler's.

K1.5: arXiv 2501.12599, eq. 3. K2: arXiv 2507.20534. The advantages are rewards minus the group's
mean.
"""

from typing import Literal

import torch

from learner.config.option_types import Finite
from learner.losses.loss_inputs import LossInputs, TokenLoss


def kimi(
    inputs: LossInputs,
    *,
    tau: Finite = 0.1,
    variant: Literal["k1.5", "k2", "token_sq"] = "k1.5",
) -> TokenLoss:
    """L = −Σ_t A·log π(y_t) + τ/2·D² for a sequence, D = Σ_t (log current − log behaviour).

    Every token of a sequence carries L, so that `sequence_mean` is the mean of L over sequences.
    No ratio is exponentiated, so D is not bounded. By `variant`:

        k1.5       as above
        k2         (A − τ·D)², whose gradient is 2τ times that of k1.5
        token_sq   ℓ_t = −A·log π(y_t) + τ/2·(log current − log behaviour)²: without cross terms
    """
    gain = inputs.gains * inputs.current
    if variant == "token_sq":
        return TokenLoss(tau / 2 * inputs.raw_full_log_ratio.square() - gain, {})
    sequences, dtype = inputs.sequences, inputs.current.dtype
    distance = sequences.totals(inputs.raw_full_log_ratio)
    if variant == "k1.5":
        loss = tau / 2 * distance.square() - sequences.totals(gain)
    else:
        loss = (sequences.means(inputs.gains, inputs.trained) - tau * distance).square()
    return TokenLoss(torch.where(inputs.trained, loss.to(dtype), 0.0), {})

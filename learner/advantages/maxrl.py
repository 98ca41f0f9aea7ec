"""MaxRL: centred and divided by the group's success rate (Tajwar et al. 2026, arXiv 2602.02710)."""

import torch
from torch import Tensor

from headway.errors import InputError
from learner.advantages.grouped import GroupedRewards
from queues.policy.dynamic_sampling import TIE


def maxrl(batch: GroupedRewards) -> Tensor:
    """A_i = (R_i − μ_g) / μ_g, and 0 where μ_g = 0: hard prompts weigh as 1 / success rate.

    Of binary rewards, averaged over the G rollouts, unbiased for ∇ Σ_{k<G} pass@k / k, the maximum
    likelihood objective to order G − 1. Negative rewards are refused.
    """
    if (batch.rewards < -TIE).any():  # shaping that was taken off leaves rounding
        raise InputError(
            f"advantage 'maxrl' needs rewards >= 0, found {float(batch.rewards.min()):g}"
        )
    return torch.where(batch.tied, 0.0, batch.centred / batch.means)

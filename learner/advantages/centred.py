"""Rewards less a baseline of their group, and scaled."""

import torch
from torch import Tensor

from headway.errors import InputError
from learner.advantages.grouped import GroupedRewards
from queues.policy.dynamic_sampling import TIE


def dr_grpo(batch: GroupedRewards) -> Tensor:
    """A_i = R_i − μ_g: Dr. GRPO (Liu et al. 2025, arXiv 2503.20783, §3).

    `rloo` up to the factor (G − 1) / G. The other half of the method is the aggregation
    `fixed_length`.
    """
    return batch.centred


def rloo(batch: GroupedRewards) -> Tensor:
    """A_i = R_i − mean of the others = G / (G − 1) · (R_i − μ_g). Unbiased.

    RLOO (Ahmadian et al. 2024, arXiv 2402.14740).
    """
    return batch.leave_one_out


def batch_norm(batch: GroupedRewards, *, epsilon: float = 1e-6) -> Tensor:
    """A_i = (R_i − μ_g) / (σ + ε), σ the deviation of the centred rewards over the batch.

    Lite-PPO (arXiv 2508.08221); ScaleRL (arXiv 2510.13786). σ is Bessel's, over the rollouts of
    groups with variance only, so that filtering the others before or after changes nothing. Exactly
    0 in a group without variance.
    """
    centred, kept = batch.centred, int((~batch.tied).sum())
    deviation = (centred.square().sum() / max(kept - 1, 1)).sqrt()
    return centred / (deviation + epsilon)


def maxrl(batch: GroupedRewards) -> Tensor:
    """A_i = (R_i − μ_g) / μ_g, and 0 where μ_g = 0: hard prompts weigh as 1 / success rate.

    MaxRL (Tajwar et al. 2026, arXiv 2602.02710). Of binary rewards, averaged over the G rollouts,
    unbiased for ∇ Σ_{k<G} pass@k / k, the maximum likelihood objective to order G − 1. Negative
    rewards are refused.
    """
    if (batch.rewards < -TIE).any():  # shaping that was taken off leaves rounding
        raise InputError(
            f"advantage 'maxrl' needs rewards >= 0, found {float(batch.rewards.min()):g}"
        )
    return torch.where(batch.tied, 0.0, batch.centred / batch.means)


def opo(batch: GroupedRewards) -> Tensor:
    """A_i = R_i − Σ_g n_j·R_j / Σ_g n_j, n the sampled tokens; not scaled.

    OPO (Hao et al. 2025, arXiv 2505.23585): the baseline of least variance. The weight stands for
    the squared norm of a rollout's gradient. The rollout itself is in its baseline, so the estimate
    is biased, as `dr_grpo` is.
    """
    assert batch.lengths is not None
    lengths = batch.lengths.double()
    tokens = batch.group_sum(lengths)
    baseline = batch.group_sum(lengths * batch.rewards) / tokens.clamp(min=1)
    return torch.where(batch.tied | (tokens == 0), 0.0, batch.rewards - baseline)

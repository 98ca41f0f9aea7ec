"""Rewards centred in their group, and scaled by one number for all."""

from torch import Tensor

from learner.advantages.grouped import GroupedRewards


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

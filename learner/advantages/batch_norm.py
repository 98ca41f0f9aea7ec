"""Centred in the group, scaled over the batch (Lite-PPO, arXiv 2508.08221; ScaleRL, 2510.13786)."""

from torch import Tensor

from learner.advantages.grouped import GroupedRewards
from learner.advantages.registry import built_in_advantage


@built_in_advantage("batch_norm")
def batch_norm(batch: GroupedRewards, *, epsilon: float = 1e-6) -> Tensor:
    """A_i = (R_i − μ_g) / (σ + ε), σ the deviation of the centred rewards over the batch.

    σ is Bessel's, over the rollouts of groups with variance only, so that filtering the others
    before or after changes nothing. Exactly 0 in a group without variance.
    """
    centred, kept = batch.centred, int((~batch.tied).sum())
    deviation = (centred.square().sum() / max(kept - 1, 1)).sqrt()
    return centred / (deviation + epsilon)

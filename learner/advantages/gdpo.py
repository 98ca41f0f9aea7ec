"""GDPO: each of several rewards normalised by itself (Liu et al. 2026, arXiv 2601.05242)."""

from collections.abc import Mapping

import torch

from headway.errors import InputError
from learner.advantages.estimation import Estimate
from learner.advantages.grouped import GroupedRewards


def gdpo(
    batch: GroupedRewards, *, weights: Mapping[str, float] | None = None, epsilon: float = 1e-6
) -> Estimate:
    """A_i = (S_i − mean S) / (σ_S + ε), S_i = Σ_n w_n·(R_i^n − μ_g^n) / (σ_g^n + ε) over parts n.

    A part without variance in a group adds 0 there while the others go on; so does a part that is
    not finite, which also stays out of its group's statistics. Mean and σ of S (Bessel's) are over
    the rollouts of groups in which some part varies; in the others A is exactly 0. A rollout
    without any of the parts does not train, and the rollout's own reward is not used.

    `weights` are by the name of the part: other parts do not count, and a name that the batch lacks
    adds nothing. None: every part counts 1.
    """
    if batch.tokens is not None and batch.tokens.rewards.any():
        raise InputError(
            "advantage 'gdpo' normalises the parts of the reward, and token rewards belong to "
            "none; put a KL penalty in the loss"
        )
    weights = dict.fromkeys(batch.reward_parts, 1.0) if weights is None else weights
    total = torch.zeros_like(batch.rewards)
    varied, keep = torch.zeros_like(batch.groups), torch.zeros_like(batch.groups, dtype=torch.bool)
    for name, weight in sorted(weights.items()):
        if name not in batch.reward_parts:  # perhaps only this batch lacks it
            continue
        finite = torch.isfinite(batch.reward_parts[name])
        part = GroupedRewards(batch.reward_parts[name][finite], batch.groups[finite])
        total[finite] += weight * part.normalised(epsilon)
        varied[finite] += (~part.tied).long()
        keep |= finite
    kept = keep & (batch.group_sum(varied) > 0)
    chosen = total[kept]
    deviation = (chosen - chosen.mean()).square().sum() / max(len(chosen) - 1, 1)
    total[kept] = (chosen - chosen.mean()) / (deviation.sqrt() + epsilon)
    return Estimate(torch.where(kept, total, 0.0), keep=keep)

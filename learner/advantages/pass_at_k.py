"""Pass@k training: credit for a set of k rollouts in which one is correct (arXiv 2508.10751)."""

from math import comb

import torch
from torch import Tensor

from learner.advantages.grouped import GroupedRewards
from learner.config.option_types import Count


def pass_at_k(
    batch: GroupedRewards, *, k: Count = 4, threshold: float = 0.5, epsilon: float = 1e-6
) -> Tensor:
    """A_i = the mean over all sets of k rollouts with i in them of (set has a success − ρ) / σ.

    Of a group of n with c correct: ρ = 1 − C(n−c, k) / C(n, k), σ = √(ρ(1 − ρ)), and
    A_correct = (1 − ρ) / (σ + ε), A_wrong = (1 − ρ − C(n−c−1, k−1) / C(n−1, k−1)) / (σ + ε)
    (Chen et al. 2025, §2.4, "analytical derivation"). Sums to 0 over a group. Exactly 0 where every
    set has a success, or none.

    A rollout is correct if its reward is at least `threshold`; nothing else of the reward counts.
    `k` is below the group's size, else all rollouts have the same credit; in a smaller group it is
    the group's size.
    """
    correct = batch.rewards >= threshold
    counts = torch.stack([batch.sizes, batch.group_sum(correct.double())], 1).long()
    kinds, kind = torch.unique(counts, dim=0, return_inverse=True)
    table = [_advantages(n, c, min(k, n), epsilon) for n, c in kinds.tolist()]
    both = torch.tensor(table, dtype=torch.float64, device=kind.device).reshape(-1, 2)
    return both[kind, correct.long()]


def _advantages(n: int, c: int, k: int, epsilon: float) -> tuple[float, float]:
    """Return the advantages of a wrong and of a correct rollout, where c of n are correct."""
    failures = comb(n - c, k) / comb(n, k)  # 1 − ρ
    deviation = (failures * (1 - failures)) ** 0.5
    if not deviation:
        return 0.0, 0.0
    others_wrong = comb(n - c - 1, k - 1) / comb(n - 1, k - 1)
    return (failures - others_wrong) / (deviation + epsilon), failures / (deviation + epsilon)

"""The best rollouts of a group: to imitate them, or as pairs with the worst.

RAFT: Dong et al. 2023 (arXiv 2304.06767). Pairs, for online DPO: OAIF (arXiv 2402.04792).
"""

from dataclasses import replace

import torch

from learner.advantages.grouped import GroupedRewards
from learner.advantages.registry import ESTIMATORS, Estimate
from learner.errors import InputError


@ESTIMATORS.built_in("best_of_n")
def best_of_n(batch: GroupedRewards, *, top: int = 1, min_reward: float | None = None) -> Estimate:
    """A_i = 1 for the `top` rollouts of a group by reward; the others do not train.

    Among equal rewards the first in the batch is taken (RAFT: any), so that a batch trained again
    is the same. A group without variance is skipped, unless `min_reward`, the least reward that a
    chosen rollout has, accepts it.
    """
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise InputError(f"top of advantage 'best_of_n' must be a positive integer, found {top!r}")
    eligible = ~batch.tied if min_reward is None else batch.rewards >= min_reward
    keep = eligible & (_ranks(batch) < top)
    return Estimate(keep.double(), keep=keep)


@ESTIMATORS.built_in("best_worst")
def best_worst(batch: GroupedRewards) -> Estimate:
    """A_i = +1 for the best rollout of a group, −1 for the worst; the others do not train.

    The loss `dpo` takes the preferred side from the sign. Among equal rewards the first in the
    batch is taken. A group without variance has no pair, and is left out.
    """
    best = (_ranks(batch) == 0) & ~batch.tied
    worst = (_ranks(replace(batch, rewards=-batch.rewards)) == 0) & ~batch.tied
    return Estimate(best.double() - worst.double(), keep=best | worst)


def _ranks(batch: GroupedRewards) -> torch.Tensor:
    """Return each rollout's rank in its group by falling reward, from 0; ties in order; [R]."""
    order = torch.argsort(batch.rewards, descending=True, stable=True)
    order = order[torch.argsort(batch.groups[order], stable=True)]
    sizes = torch.bincount(batch.groups)
    starts = (sizes.cumsum(0) - sizes)[batch.groups[order]]
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(len(order), device=order.device) - starts
    return ranks

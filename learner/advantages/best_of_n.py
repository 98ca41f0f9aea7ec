"""Best of n: imitate the best rollouts of a group (RAFT, Dong et al. 2023, arXiv 2304.06767)."""

import torch

from learner.advantages.grouped import GroupedRewards
from learner.advantages.registry import Estimate, built_in_advantage
from learner.errors import InputError


@built_in_advantage("best_of_n")
def best_of_n(batch: GroupedRewards, *, top: int = 1, min_reward: float | None = None) -> Estimate:
    """A_i = 1 for the `top` rollouts of a group by reward; the others do not train.

    Among equal rewards the first in the batch is taken (RAFT: any), so that a batch trained again
    is the same. A group without variance is skipped, unless `min_reward`, the least reward that a
    chosen rollout has, accepts it.
    """
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise InputError(f"top of advantage 'best_of_n' must be a positive integer, found {top!r}")
    eligible = ~batch.tied if min_reward is None else batch.rewards >= min_reward
    keep = eligible & (ranks(batch) < top)
    return Estimate(keep.double(), keep=keep)


def ranks(batch: GroupedRewards) -> torch.Tensor:
    """Return each rollout's rank in its group by falling reward, from 0; ties in order; [R]."""
    order = torch.argsort(batch.rewards, descending=True, stable=True)
    order = order[torch.argsort(batch.groups[order], stable=True)]
    sizes = torch.bincount(batch.groups)
    starts = (sizes.cumsum(0) - sizes)[batch.groups[order]]
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(len(order), device=order.device) - starts
    return ranks

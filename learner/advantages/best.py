"""The best rollouts of a group: to imitate them, or as pairs with the worst.

RAFT: Dong et al. 2023 (arXiv 2304.06767). Pairs, for online DPO: OAIF (arXiv 2402.04792).
"""

from dataclasses import replace

import torch
from torch import Tensor

from learner.advantages.estimation import Estimate
from learner.advantages.grouped import GroupedRewards
from learner.config.option_types import Count


def best_of_n(
    batch: GroupedRewards, *, top: Count = 1, min_reward: float | None = None
) -> Estimate:
    """A_i = 1 for the `top` rollouts of a group by reward; the others do not train.

    The group is its `trainable` rollouts. Among equal rewards the first in the batch is taken
    (RAFT: any), so that a batch trained again is the same. A group without variance is skipped,
    unless `min_reward`, the least reward that a chosen rollout has, accepts it.
    """
    among = _trainable(batch)
    eligible = ~among.tied if min_reward is None else among.rewards >= min_reward
    keep = _scattered(batch, eligible & (_ranks(among) < top))
    return Estimate(keep.double(), keep=keep)


def best_worst(batch: GroupedRewards) -> Estimate:
    """A_i = +1 for the best rollout of a group, −1 for the worst; the others do not train.

    The loss `dpo` takes the preferred side from the sign. The group is its `trainable` rollouts.
    Among equal rewards the first in the batch is taken. A group without variance has no pair, and
    is left out.
    """
    among = _trainable(batch)
    best = _scattered(batch, (_ranks(among) == 0) & ~among.tied)
    reverse = replace(among, rewards=-among.rewards)
    worst = _scattered(batch, (_ranks(reverse) == 0) & ~among.tied)
    return Estimate(best.double() - worst.double(), keep=best | worst)


def _trainable(batch: GroupedRewards) -> GroupedRewards:
    """Return the rollouts that may train."""
    return batch if batch.trainable is None else batch.of_rollouts(batch.trainable)


def _scattered(batch: GroupedRewards, chosen: Tensor) -> Tensor:
    """Scatter a choice among the rollouts that may train over all, [R] bool."""
    if batch.trainable is None:
        return chosen
    return torch.zeros_like(batch.trainable).masked_scatter(batch.trainable, chosen)


def _ranks(batch: GroupedRewards) -> Tensor:
    """Return each rollout's rank in its group by falling reward, from 0; ties in order; [R]."""
    order = torch.argsort(batch.rewards, descending=True, stable=True)
    order = order[torch.argsort(batch.groups[order], stable=True)]
    sizes = torch.bincount(batch.groups)
    starts = (sizes.cumsum(0) - sizes)[batch.groups[order]]
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(len(order), device=order.device) - starts
    return ranks

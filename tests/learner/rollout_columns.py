"""Advantages of rollouts whose columns are given one by one."""

import torch

from learner.advantages import compute_advantages
from learner.advantages.grouped import GroupedRewards, RolloutTokens

COLUMNS = {"lengths", "state", "baseline_rewards", "reward_parts", "truncated"}


def advantages(
    name, rewards, groups, *, mask=None, sequence_ids=None, token_rewards=None, values=None,
    **options,
):  # fmt: skip
    """Compute advantages; options that are no columns of rollouts go to the estimator."""
    columns = {key: options.pop(key) for key in COLUMNS & set(options)}
    if mask is not None:
        extra = torch.zeros(len(mask)) if token_rewards is None else token_rewards
        columns["tokens"] = RolloutTokens(mask, sequence_ids, extra, values)
    return compute_advantages(name, GroupedRewards(rewards, groups, **columns), **options)

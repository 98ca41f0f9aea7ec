"""ReMax: the reward of a greedy rollout as the baseline (Li et al. 2023, arXiv 2310.10505)."""

import torch
from torch import Tensor

from learner.advantages.grouped import GroupedRewards
from learner.advantages.registry import Estimate, built_in_advantage
from learner.advantages.returns import returns_to_go
from learner.errors import InputError


@built_in_advantage("remax")
def remax(batch: GroupedRewards) -> Tensor | Estimate:
    """A_i = R_i − R(greedy rollout of the same prompt). Unbiased, by an older policy's greedy too.

    With tokens, A_t [N] = Q_t − R(greedy), Q_t the sum of the token rewards from t on and of the
    final reward (Algorithm 1). The greedy rollout itself does not train.
    """
    if batch.baseline_rewards is None:
        raise InputError("advantage 'remax' needs baseline_rewards, which was not given")
    if batch.tokens is None:
        return batch.rewards - batch.baseline_rewards
    tokens = batch.tokens
    rewards = tokens.with_final(batch.rewards)
    to_go = returns_to_go(rewards, tokens.mask, tokens.sequence_ids)
    centred = to_go - batch.baseline_rewards[tokens.sequence_ids]
    return Estimate(torch.where(tokens.mask, centred, 0.0), token_level=True)

"""Returns to go, less a baseline: REINFORCE++ (Hu et al. 2025, arXiv 2501.03262) and ReMax."""

import torch
from torch import Tensor

from learner.advantages.estimation import Estimate
from learner.advantages.grouped import GroupedRewards
from learner.advantages.returns import returns_to_go, whiten


def reinforce_pp(batch: GroupedRewards, *, gamma: float = 1.0) -> Estimate:
    """A_t = whiten(Q_t), Q_t = Σ_{s ≥ t} γ^(s − t)·r_s over the sampled tokens of a rollout.

    r is the token reward (−β·k1 in the paper) plus, at the last sampled token, the final reward.
    Mean and variance are over all sampled tokens of the batch, so long rollouts weigh more.
    """
    tokens = batch.the_tokens("reinforce_pp")
    rewards = tokens.with_final(batch.rewards)
    to_go = returns_to_go(rewards, tokens.mask, tokens.episodes, gamma=gamma)
    return Estimate(whiten(to_go, tokens.mask), token_level=True)


def reinforce_pp_baseline(batch: GroupedRewards, *, gamma: float = 1.0) -> Estimate:
    """REINFORCE++-baseline: A_t = whiten(Q_t), Q_t as in `reinforce_pp`, of the reward R_i − μ_g.

    Groups without variance, which have no token rewards either (a step that earned 0 has one), stay
    exactly 0 and out of the mean and the variance, so that filtering them before or after changes
    nothing.
    """
    tokens = batch.the_tokens("reinforce_pp_baseline")
    rewards = tokens.with_final(batch.centred)
    to_go = returns_to_go(rewards, tokens.mask, tokens.episodes, gamma=gamma)
    has_reward = tokens.rewards != 0
    if tokens.step_ends is not None:
        has_reward |= tokens.step_ends
    rewarded = tokens.sums(has_reward, len(batch.rewards))
    silent = batch.tied & (batch.group_sum(rewarded) == 0)
    informative = tokens.mask & ~silent[tokens.sequence_ids]
    return Estimate(whiten(to_go, informative), token_level=True)


def remax(batch: GroupedRewards) -> Tensor | Estimate:
    """A_i = R_i − R(greedy rollout of the same prompt). Unbiased, by an older policy's greedy too.

    ReMax (Li et al. 2023, arXiv 2310.10505); the greedy rollout itself does not train. With tokens,
    A_t [N] = Q_t − R(greedy), Q_t the sum of the token rewards from t on and of the final reward
    (Algorithm 1).
    """
    assert batch.baseline_rewards is not None
    if batch.tokens is None:
        return batch.rewards - batch.baseline_rewards
    tokens = batch.tokens
    rewards = tokens.with_final(batch.rewards)
    to_go = returns_to_go(rewards, tokens.mask, tokens.episodes)
    centred = to_go - batch.baseline_rewards[tokens.sequence_ids]
    return Estimate(torch.where(tokens.mask, centred, 0.0), token_level=True)

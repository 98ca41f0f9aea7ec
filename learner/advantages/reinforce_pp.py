"""REINFORCE++: return to go, whitened over all tokens (Hu et al. 2025, arXiv 2501.03262)."""

from learner.advantages.grouped import GroupedRewards
from learner.advantages.registry import Estimate, built_in_advantage
from learner.advantages.returns import returns_to_go
from learner.advantages.whitening import whiten


@built_in_advantage("reinforce_pp")
def reinforce_pp(batch: GroupedRewards, *, gamma: float = 1.0) -> Estimate:
    """A_t = whiten(Q_t), Q_t = Σ_{s ≥ t} γ^(s − t)·r_s over the sampled tokens of a rollout.

    r is the token reward (−β·k1 in the paper) plus, at the last sampled token, the final reward.
    Mean and variance are over all sampled tokens of the batch, so long rollouts weigh more.
    """
    tokens = batch.the_tokens("reinforce_pp")
    rewards = tokens.with_final(batch.rewards)
    to_go = returns_to_go(rewards, tokens.mask, tokens.sequence_ids, gamma=gamma)
    return Estimate(whiten(to_go, tokens.mask), token_level=True)


@built_in_advantage("reinforce_pp_baseline")
def reinforce_pp_baseline(batch: GroupedRewards, *, gamma: float = 1.0) -> Estimate:
    """REINFORCE++-baseline: A_t = whiten(Q_t), Q_t as in `reinforce_pp`, of the reward R_i − μ_g.

    Groups without variance, which have no token rewards either, stay exactly 0 and out of the mean
    and the variance, so that filtering them before or after changes nothing.
    """
    tokens = batch.the_tokens("reinforce_pp_baseline")
    rewards = tokens.with_final(batch.centred)
    to_go = returns_to_go(rewards, tokens.mask, tokens.sequence_ids, gamma=gamma)
    rewarded = tokens.sums((tokens.rewards != 0).double(), len(batch.rewards))
    silent = batch.tied & (batch.group_sum(rewarded) == 0)
    informative = tokens.mask & ~silent[tokens.sequence_ids]
    return Estimate(whiten(to_go, informative), token_level=True)

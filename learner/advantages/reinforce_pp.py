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

"""PPO's advantages, by a critic: GAE (arXiv 1506.02438), with VAPO's two λ (2504.05118)."""

from functools import partial

import torch
from torch import Tensor

from headway.errors import InputError
from learner.advantages.estimation import Estimate
from learner.advantages.grouped import GroupedRewards
from learner.advantages.returns import gae as estimate_advantages
from learner.advantages.returns import length_adaptive_lambda
from learner.advantages.returns import whiten as whitened


def gae(
    batch: GroupedRewards,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    lam_values: float | None = None,
    length_adaptive: float | None = None,
    whiten: bool = True,
    bootstrap_truncated: bool = False,
) -> Estimate:
    """A_t by `returns.gae` of token rewards and, on the last sampled token, the reward.

    Args:
        batch: With tokens and `values`.
        gamma: Discount per sampled token.
        lam: λ of the policy's advantages.
        lam_values: λ of the critic's targets (VAPO's decoupled GAE: 1); None: `lam`.
        length_adaptive: α of λ = 1 − 1 / (α·n), which replaces `lam` (VAPO: 0.05); None: off.
        whiten: Whiten the advantages over all sampled tokens, as PPO does; never the returns.
        bootstrap_truncated: After a rollout that was cut off, go on with the critic's value of the
            state after its last token, not with 0, on every path if its history forks; needs
            `truncated` and `end_values`.

    Returns:
        Advantages and returns, [N] float64.
    """
    tokens = batch.the_tokens("gae")
    values = tokens.values
    assert values is not None
    rewards = tokens.with_final(batch.rewards)
    following = tokens.of_episodes(_after_the_end(batch)) if bootstrap_truncated else 0.0
    columns = (rewards, values, tokens.mask, tokens.episodes)
    estimate = partial(estimate_advantages, *columns, gamma=gamma, bootstrap=following)
    lam_policy: float | Tensor = lam
    if length_adaptive is not None:
        ids, episode = torch.unique(tokens.episodes, return_inverse=True)
        lengths = torch.bincount(episode[tokens.mask], minlength=len(ids))
        lam_policy = length_adaptive_lambda(lengths, length_adaptive)
    advantages, returns = estimate(lam=lam_policy)
    if lam_values is not None or length_adaptive is not None:
        _, returns = estimate(lam=lam if lam_values is None else lam_values)
    if whiten:
        advantages = whitened(advantages, tokens.mask)
    return Estimate(advantages, token_level=True, returns=returns)


def _after_the_end(batch: GroupedRewards) -> Tensor:
    """Return the value of the state after each rollout, [R]."""
    if batch.truncated is None or batch.end_values is None:
        raise InputError("bootstrap_truncated of advantage 'gae' needs truncated and end_values")
    return torch.where(batch.truncated, batch.end_values, 0.0)

"""GRPO: the reward normalised within its group (Shao et al. 2024, arXiv 2402.03300, §4.1)."""

import torch
from torch import Tensor

from learner.advantages.estimation import Estimate
from learner.advantages.grouped import GroupedRewards
from learner.advantages.returns import returns_to_go


def grpo(
    batch: GroupedRewards, *, epsilon: float = 1e-6, process_rewards: bool = False
) -> Tensor | Estimate:
    """A_i = (R_i − μ_g) / (σ_g + ε), exactly 0 in a group without variance (§4.1.2).

    With `process_rewards`, the variant of §4.1.3: every step's reward is normalised by the mean and
    σ of all steps of the group, and A_t [N] = Σ of those of the steps that end at t or later. A
    step's reward, perhaps 0, is the sum over its tokens, and for the last step of an episode the
    final reward as well. σ_g is Bessel's (divides by G − 1) over the whole group.
    """
    if not process_rewards:
        return batch.with_token_rewards().normalised(epsilon)
    tokens = batch.the_tokens("grpo")
    ends = tokens.ends_of_steps()
    of_steps, step = tokens.sequence_ids[ends], ends.cumsum(0) - ends.long()
    sampled = tokens.with_final(batch.rewards)[tokens.mask]
    sums = sampled.new_zeros(len(of_steps)).index_add(0, step[tokens.mask], sampled)
    steps = GroupedRewards(sums, batch.groups[of_steps])
    alone = batch.sizes[of_steps] < 2
    rewards = torch.zeros_like(tokens.rewards)
    rewards[ends] = torch.where(alone, 0.0, steps.normalised(epsilon))
    to_go = returns_to_go(rewards, tokens.mask, tokens.episodes)
    return Estimate(to_go, token_level=True)

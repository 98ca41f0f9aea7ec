"""Terms added to a policy loss: likelihood of positive rollouts, entropy.

Importance weights never multiply them. KL terms are in `learner.losses.kl`.
"""

import torch
from torch import Tensor

from headway.errors import InputError
from learner.losses.loss_inputs import LossInputs, TokenLoss


def positive_tokens(rewards: Tensor, mask: Tensor, *, threshold: float = 0.0) -> Tensor:
    """Return the tokens that train of rollouts with a reward above `threshold`, [N] bool.

    `rewards` [N] is the reward of the token's rollout. The count over the whole batch is `total` of
    `positive_nll`.
    """
    return mask & (rewards > threshold)


def positive_nll(inputs: LossInputs, *, total: float, threshold: float = 0.0) -> TokenLoss:
    """−log π(y_t) / total on the tokens of positive rollouts: VAPO (arXiv 2504.05118).

    `total` counts the `positive_tokens` of the whole batch, on all ranks, so that the sum over all
    microbatches is the mean over them, without token weights. Stats count tokens: `positive`.

    Raises:
        InputError: No rewards.
    """
    rewards: Tensor = inputs.require("positive_nll", "rewards")
    positive = positive_tokens(rewards, inputs.trained, threshold=threshold)
    per_token = torch.where(positive, -inputs.current, 0.0) / max(total, 1)
    return TokenLoss(per_token, {"positive": positive.sum()})


def entropy_bonus(inputs: LossInputs) -> TokenLoss:
    """−H_t, H the entropy of the distribution that the token was drawn from.

    −log π(y_t) would not do: its gradient is 0 in expectation.

    Raises:
        InputError: No entropies, or entropies that were computed without a gradient.
    """
    entropies: Tensor = inputs.require("the entropy bonus", "entropies")
    if inputs.logprobs.requires_grad and not entropies.requires_grad:
        raise InputError(
            "the entropy bonus needs entropies with a gradient; found detached ones "
            "(chunked_logprobs with entropy_gradient = True)"
        )
    return TokenLoss(torch.where(inputs.trained, -entropies, 0.0), {})


def adapted_entropy_coefficient(
    coefficient: float, entropy: float, *, target: float, step: float
) -> float:
    """Return the coefficient of the bonus after a batch: Skywork-OR1 (arXiv 2505.22312).

    It grows by `step` where the mean `entropy` of the batch is at most the target, in nats a token,
    and falls by it otherwise, never below 0.
    """
    return max(0.0, coefficient + (step if entropy <= target else -step))

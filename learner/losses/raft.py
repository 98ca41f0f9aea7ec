"""RAFT: likelihood of the best rollouts, nothing else.

Dong et al. 2023 (arXiv 2304.06767); all positives: as in Xiong et al. 2025 (arXiv 2504.11343).
"""

from typing import Literal

import torch
from torch import Tensor

from learner.losses.loss_inputs import LossInputs, Segments, TokenLoss


def raft(inputs: LossInputs, *, keep: Literal["positive", "best"] = "positive") -> TokenLoss:
    """ℓ_t = −log π(y_t) on rollouts that are kept, 0 on the others. No importance weights.

    `keep` "positive": rollouts better than their baseline (A > 0); "best": the best of each group
    that has a positive one. Equally good rollouts share its weight, which equals breaking the tie
    at random in expectation. Denominators stay those of all rollouts: what is not kept counts as 0.

    Stats count tokens: `kept`.
    """
    weight = (inputs.gains > 0).to(inputs.current.dtype)
    if keep == "best":
        weight = weight * _share_of_best(inputs)
    return TokenLoss(-weight * inputs.current, {"kept": (weight > 0).sum()})


def _share_of_best(inputs: LossInputs) -> Tensor:
    """Return 1 / (number of best rollouts in the group) for tokens of a best rollout, else 0."""
    groups = Segments(inputs.require('raft with keep = "best"', "group_ids"))
    gains = torch.where(inputs.trained, inputs.gains, -torch.inf)
    highest = gains.new_full((groups.count,), -torch.inf)
    highest = highest.scatter_reduce(0, groups.index, gains, "amax")
    best = inputs.trained & (gains == highest[groups.index])
    # A rollout counts once, however many tokens it has.
    once = torch.where(best, 1 / inputs.sequences.totals(best).clamp(min=1), 0.0)
    return torch.where(best, 1 / groups.totals(once).clamp(min=1), 0.0).to(inputs.current.dtype)

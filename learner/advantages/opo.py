"""OPO: the baseline of least variance, a mean weighted by length (Hao et al. 2025, 2505.23585)."""

import torch
from torch import Tensor

from learner.advantages.grouped import GroupedRewards


def opo(batch: GroupedRewards) -> Tensor:
    """A_i = R_i − Σ_g n_j·R_j / Σ_g n_j, n the sampled tokens; not scaled.

    The weight stands for the squared norm of a rollout's gradient. The rollout itself is in
    its baseline, so the estimate is biased, as `dr_grpo` is.
    """
    assert batch.lengths is not None
    lengths = batch.lengths.double()
    tokens = batch.group_sum(lengths)
    baseline = batch.group_sum(lengths * batch.rewards) / tokens.clamp(min=1)
    return torch.where(batch.tied | (tokens == 0), 0.0, batch.rewards - baseline)

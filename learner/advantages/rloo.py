"""RLOO: leave-one-out baseline within the group (Ahmadian et al. 2024, arXiv 2402.14740)."""

from torch import Tensor

from learner.advantages.grouped import GroupedRewards
from learner.advantages.registry import built_in_advantage


@built_in_advantage("rloo")
def rloo(batch: GroupedRewards) -> Tensor:
    """A_i = R_i − mean of the others = G / (G − 1) · (R_i − μ_g). Unbiased."""
    return batch.leave_one_out

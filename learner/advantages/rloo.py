"""RLOO: leave-one-out baseline within the group (Ahmadian et al. 2024, arXiv 2402.14740)."""

from torch import Tensor

from learner.advantages.estimator import GroupedRewards, advantage
from learner.errors import InputError


@advantage("rloo")
def rloo(batch: GroupedRewards) -> Tensor:
    """A_i = R_i − mean of the others = G / (G − 1) · (R_i − μ_g). Unbiased.

    Returns:
        [R] float64.

    Raises:
        InputError: A group has a single rollout, so there are no others.
    """
    if (batch.sizes < 2).any():
        raise InputError("leaving one out needs at least 2 rollouts a group, found a group of 1")
    return batch.sizes / (batch.sizes - 1) * batch.centred

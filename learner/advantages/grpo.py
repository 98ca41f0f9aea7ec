"""GRPO: the reward normalised within its group (Shao et al. 2024, arXiv 2402.03300, §4.1.2)."""

from torch import Tensor

from learner.advantages.estimator import GroupedRewards, advantage


@advantage("grpo")
def grpo(batch: GroupedRewards, *, epsilon: float = 1e-6) -> Tensor:
    """A_i = (R_i − μ_g) / (σ_g + ε), exactly 0 in a group without variance.

    σ_g is Bessel's (divides by G − 1) over the whole group, as in TRL, verl and OpenRLHF.

    Returns:
        [R] float64.
    """
    variance = batch.group_sum(batch.centred.square()) / (batch.sizes - 1).clamp(min=1)
    return batch.centred / (variance.sqrt() + epsilon)

"""Dr. GRPO: centred within the group, not scaled (Liu et al. 2025, arXiv 2503.20783, §3).

The other half of the method is the aggregation `fixed_length`.
"""

from torch import Tensor

from learner.advantages.grouped import GroupedRewards
from learner.advantages.registry import built_in_advantage


@built_in_advantage("dr_grpo")
def dr_grpo(batch: GroupedRewards) -> Tensor:
    """A_i = R_i − μ_g; `rloo` up to the factor (G − 1) / G."""
    return batch.centred

"""Advantage estimators: one idea a file, found by name.

`estimator` says what each is given and returns; the others register themselves on import.
"""

from learner.advantages import dr_grpo, grpo, reinforce, rloo
from learner.advantages.estimator import (
    ESTIMATORS,
    Advantages,
    GroupedRewards,
    advantage,
    compute_advantages,
)

__all__ = [
    "ESTIMATORS",
    "Advantages",
    "GroupedRewards",
    "advantage",
    "compute_advantages",
    "dr_grpo",
    "grpo",
    "reinforce",
    "rloo",
]

"""Advantage estimators: one idea a file, found by name.

`grouped` says what each is given, `estimator` what it returns; the others register themselves on
import.
"""

from learner.advantages import (
    batch_norm,
    best_of_n,
    best_worst,
    dr_grpo,
    gae,
    gdpo,
    grpo,
    maxrl,
    opo,
    pass_at_k,
    reinforce,
    reinforce_pp,
    reinforce_pp_baseline,
    remax,
    rloo,
)
from learner.advantages.grouped import GroupedRewards, RolloutTokens
from learner.advantages.registry import (
    ESTIMATORS,
    Advantages,
    Estimate,
    Estimator,
    advantage,
    compute_advantages,
)

__all__ = [
    "ESTIMATORS",
    "Advantages",
    "Estimate",
    "Estimator",
    "GroupedRewards",
    "RolloutTokens",
    "advantage",
    "batch_norm",
    "best_of_n",
    "best_worst",
    "compute_advantages",
    "dr_grpo",
    "gae",
    "gdpo",
    "grpo",
    "maxrl",
    "opo",
    "pass_at_k",
    "reinforce",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "rloo",
]

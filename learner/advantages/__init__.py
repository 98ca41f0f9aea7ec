"""Advantage estimators: one idea a file, found by name."""

from learner.advantages.registry import (
    ESTIMATORS,
    Advantages,
    Estimate,
    Estimator,
    advantage,
    compute_advantages,
    estimate_advantages,
)
from learner.registry import import_modules

__all__ = [
    "ESTIMATORS",
    "Advantages",
    "Estimate",
    "Estimator",
    "advantage",
    "compute_advantages",
    "estimate_advantages",
]

import_modules(__name__, __path__)

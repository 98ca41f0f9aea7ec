"""Advantage estimators: one idea a file, found by name."""

from learner.advantages.estimation import (
    Advantages,
    Estimate,
    advantage,
    compute_advantages,
    estimate_advantages,
)

__all__ = ["Advantages", "Estimate", "advantage", "compute_advantages", "estimate_advantages"]

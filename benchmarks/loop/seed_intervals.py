"""Means over seeds with Student's 95 % intervals, and their words; pure."""

from collections.abc import Iterable
from math import exp, log, sqrt
from statistics import fmean, stdev
from typing import NamedTuple

from mpmath import betainc

CHANCE = 0.05
"""Share of intervals that do not hold the true mean."""
LEAST_SEEDS = 3
"""Seeds from which on an interval is claimed."""


class Estimate(NamedTuple):
    """A mean over seeds, and the ends of its interval, None with fewer than LEAST_SEEDS."""

    mean: float
    low: float | None
    high: float | None
    seeds: int

    def text(self, form: str) -> str:
        """Return the mean and the interval in brackets."""
        if self.low is None:
            return f"{self.mean:{form}}"
        return f"{self.mean:{form}} [{self.low:{form}}, {self.high:{form}}]"


def estimate(values: Iterable[float | None]) -> Estimate | None:
    """Return the estimate of the values that are known; None without any."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    middle, count = fmean(known), len(known)
    if count < LEAST_SEEDS:
        return Estimate(middle, None, None, count)
    half = t_quantile(1 - CHANCE / 2, count - 1) * stdev(known) / sqrt(count)
    return Estimate(middle, middle - half, middle + half, count)


def estimate_ratio(values: Iterable[float]) -> Estimate | None:
    """Return the geometric mean of positive ratios, with its interval; None without any."""
    of_logarithms = estimate(map(log, values))
    if of_logarithms is None:
        return None
    mean, low, high, count = of_logarithms
    if low is None or high is None:
        return Estimate(exp(mean), None, None, count)
    return Estimate(exp(mean), exp(low), exp(high), count)


def t_quantile(probability: float, freedom: int) -> float:
    """Return a quantile of Student's distribution, above the median (A&S 1964, 26.5.27)."""
    low, high = 0.0, 1e4
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        x = freedom / (freedom + middle**2)
        above = betainc(freedom / 2, 0.5, 0, x, regularized=True) / 2
        low, high = (middle, high) if above > 1 - probability else (low, middle)
    return high

"""Student's confidence interval of a mean."""

from collections.abc import Sequence
from math import sqrt
from statistics import fmean, stdev

from mpmath import betainc

CONFIDENCE = 0.95


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return Student's interval of the mean; a seed is one observation.

    Raises:
        ValueError: Less than two observations.
    """
    count = len(values)
    if count < 2:
        raise ValueError("an interval needs at least two observations")
    half = t_quantile(0.5 + CONFIDENCE / 2, count - 1) * stdev(values) / sqrt(count)
    middle = fmean(values)
    return middle - half, middle + half


def t_quantile(probability: float, freedom: int) -> float:
    """Return a quantile of Student's distribution, above the median (A&S 1964, 26.5.27)."""
    low, high = 0.0, 1e4
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        x = freedom / (freedom + middle**2)
        above = betainc(freedom / 2, 0.5, 0, x, regularized=True) / 2
        low, high = (middle, high) if above > 1 - probability else (low, middle)
    return high

"""Figures of `headway bench staleness`, as pure functions of the statistics of batches.

Throughput is that of `deploy.planner.calibration`: after the first batches and before the last
lease, of the newest hundred, so that it stands beside the prediction made from the same batches.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import sqrt
from statistics import fmean, stdev
from typing import Any

from mpmath import betainc

from deploy.planner.simulator import quantile
from deploy.report.summary import WARM_UP

Row = Mapping[str, Any]
Point = tuple[float, float]
"""Seconds of training, and the held-out score at that time."""
CONFIDENCE = 0.95


def off_policyness(rows: Sequence[Row]) -> dict[str, Any]:
    """Return how far the trained tokens were from the policy that trained them.

    Args:
        rows: Statistics of the batches of one run, in order.

    Returns:
        `lag_mean`, `lag_p95`, `lag_max` in versions, over tokens; `ess`, mean over batches of the
        effective sample size as a fraction; `kl_fresh`, `kl_stale` and `kl_crossed`, nats a token
        of rollouts that the learner's own version sampled (numerics alone), that an older one did,
        and that several did, and `kl` of all; None where there were none; `clipped`, the largest
        of the shares of tokens that loss or correction clipped, capped or rejected.
    """
    measured = [row for row in rows[WARM_UP:] if row["tokens_trained"]]
    lags: Counter[int] = Counter()
    for row in measured:
        lags.update({int(lag): count for lag, count in row["lag_histogram"].items()})
    return {
        "lag_mean": sum(lag * count for lag, count in lags.items()) / lags.total(),
        "lag_p95": quantile(lags, 0.95),
        "lag_max": max(lags),
        "ess": fmean(row["ess"] for row in measured),
        **{
            f"kl_{origin}": weighed(measured, f"kl_{origin}", f"tokens_{origin}")
            for origin in ("fresh", "stale", "crossed")
        },
        "kl": weighed(measured, "kl", "tokens_trained"),
        "clipped": fmean(largest_share(row["fractions"]) for row in measured),
    }


def largest_share(fractions: Mapping[str, float]) -> float:
    """Return the largest share of tokens that one rule limited; the shares overlap."""
    return max((share for name, share in fractions.items() if name != "not_finite"), default=0.0)


def weighed(rows: Sequence[Row], figure: str, weight: str) -> float | None:
    """Return the mean of a figure over tokens; None where no row has it."""
    values = [(row[figure], row[weight]) for row in rows if row.get(figure) is not None]
    tokens = sum(count for _, count in values)
    return sum(value * count for value, count in values) / tokens if tokens else None


def curve(rows: Sequence[Row], scores: Mapping[int, float]) -> list[Point]:
    """Return held-out scores against seconds of training.

    Returns:
        (seconds from the first wait for a batch to the step that made the version, score).
    """
    began = rows[0]["wait_started_at"]
    ends = {row["version"] + 1: row["step_finished_at"] - began for row in rows}
    return [(ends.get(version, 0.0), scores[version]) for version in sorted(scores)]


def seconds_to(curve: Sequence[Point], target: float) -> float | None:
    """Return when a target is reached, interpolated between two points; None where it is not."""
    for (before, least), (seconds, score) in pairwise([*curve[:1], *curve]):
        if score >= target:
            rise = score - least
            return before + (seconds - before) * (target - least) / rise if rise else seconds
    return None


def learning(curve: Sequence[Point], target: float) -> dict[str, Any]:
    """Return the last score and its time, and the time of the target, of a curve."""
    return {
        "score": curve[-1][1],
        "seconds": curve[-1][0],
        "seconds_to_target": seconds_to(curve, target),
        "curve": curve,
    }


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Return Student's interval of the mean; a seed is one observation.

    Raises:
        ValueError: Less than two observations.
    """
    count = len(differences)
    if count < 2:
        raise ValueError("an interval needs at least two observations")
    half = t_quantile(0.5 + CONFIDENCE / 2, count - 1) * stdev(differences) / sqrt(count)
    middle = fmean(differences)
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

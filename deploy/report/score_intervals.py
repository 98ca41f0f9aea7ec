"""Held-out scores of evaluations with 95 % intervals over the problems; pure.

Rollouts of one problem are not independent, so every score is a mean over problems: `pass_at_k` and
`best_at_k` make one value of a problem's rollouts, and `mean_score` averages them.
"""

from collections.abc import Sequence
from itertools import groupby
from math import comb, sqrt
from statistics import NormalDist, fmean, pvariance
from typing import Any, NamedTuple

Z = NormalDist().inv_cdf(0.975)
Score = dict[str, Any]
"""The mean `value`, the ends `low` and `high` of its interval, and the number `n` of problems."""


def mean_score(values: Sequence[float], *, rollouts: int = 1, bounded: bool = True) -> Score:
    """Return the mean of one value for each problem, with its interval.

    Values from 0 to 1 have Wilson's interval, of n·p(1 − p)/s² problems: n for values 0 and 1, and
    more, at most one for each of the `rollouts` of a problem, where they vary less. Values without
    bounds have that of the normal distribution, whose ends are None for a single problem.
    """
    n, mean, variance = len(values), fmean(values), pvariance(values)
    if not bounded:
        half = Z * sqrt(variance / (n - 1)) if n > 1 else None
        ends = (None, None) if half is None else (mean - half, mean + half)
        return {"value": mean, "low": ends[0], "high": ends[1], "n": n}
    spread, size = max(mean * (1 - mean), 0.0), float(n)
    if spread:
        size = min(n * rollouts, n * spread / variance) if variance else n * rollouts
    centre, scale = mean + Z * Z / (2 * size), 1 + Z * Z / size
    half = Z * sqrt(spread / size + Z * Z / (4 * size * size))
    low, high = max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)
    return {"value": mean, "low": min(low, mean), "high": max(high, mean), "n": n}


def pass_at_k(correct: Sequence[bool], k: int) -> float:
    """Return the chance that one of k of a problem's n ≥ k rollouts is correct.

    1 − C(n − c, k) / C(n, k), where c are correct: unbiased (Chen et al. 2021, arXiv 2107.03374).
    """
    wrong = len(correct) - sum(correct)
    return 1 - comb(wrong, k) / comb(len(correct), k)


def best_at_k(rewards: Sequence[float], marks: Sequence[float], k: int) -> float:
    """Return the mean reward of the rollout with the highest mark among k of a problem's n ≥ k.

    The mean is over all sets of k, and over the rollouts that share the highest mark.
    """
    total, below = 0.0, 0
    ranked = sorted(zip(marks, rewards, strict=True))
    for _, tied in groupby(ranked, key=lambda pair: pair[0]):
        block = [reward for _, reward in tied]
        upto = below + len(block)
        total += (comb(upto, k) - comb(below, k)) * fmean(block)
        below = upto
    return total / comb(len(rewards), k)


class Verdict(NamedTuple):
    """Marks of a judge that compares two answers, with each of them first; 1 favours the first."""

    as_first: float
    """Its mark, from 0 to 1, where the answer in question was first."""
    as_second: float

    @property
    def agrees(self) -> bool:
        """True where both orders favour the same answer, or neither."""
        return _sign(self.as_first - 0.5) == _sign(0.5 - self.as_second)

    @property
    def outcome(self) -> float:
        """1 where both orders favour the answer in question, 0 where both favour the other."""
        return 0.5 + 0.5 * _sign(self.as_first - 0.5) if self.agrees else 0.5


def win_rate(by_problem: Sequence[Sequence[Verdict]]) -> Score:
    """Return the share of comparisons that are won, a tie counting half, with its counts.

    A comparison is a tie unless both orders favour the same answer. `agreement` is the share of
    comparisons in which they do, or in which both favour neither.
    """
    verdicts = [verdict for verdicts in by_problem for verdict in verdicts]
    outcomes = [verdict.outcome for verdict in verdicts]
    score = mean_score(
        [fmean(verdict.outcome for verdict in verdicts) for verdicts in by_problem],
        rollouts=max(map(len, by_problem)),
    )
    counts = {"wins": outcomes.count(1.0), "ties": outcomes.count(0.5), "losses": outcomes.count(0)}
    return score | counts | {"agreement": fmean(verdict.agrees for verdict in verdicts)}


def position_bias(by_problem: Sequence[Sequence[Verdict]]) -> dict[str, Score]:
    """Return how often a judge prefers what it read first, and how often its orders agree.

    `first_preferred` is a share of its marks, of which one for neither counts half: without a bias
    ½. `agreement` is the share of comparisons in which both orders favour the same, or neither.
    """
    most = max(map(len, by_problem))
    first = [
        [0.5 + sum(_sign(mark - 0.5) for mark in v) / 4 for v in group] for group in by_problem
    ]
    agree = [[float(verdict.agrees) for verdict in group] for group in by_problem]
    named = (("first_preferred", first), ("agreement", agree))
    return {name: mean_score([*map(fmean, each)], rollouts=most) for name, each in named}


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)

"""The finite-buffer law: throughput of a producer and a consumer with few batches between them.

Pure arithmetic on two phase times and their variation; `deploy.planner.simulator` has what it
leaves out: stragglers inside a batch, admission group by group, updates.

A producer that always has work and a consumer form a line. With exponential times and room for b
finished batches between them, the line is the queue M/M/1/K with K = b + 2 (Hunt, "Sequential
arrays of waiting lines", 1956). With μ₁, μ₂ the rates of the two and ρ = μ₁/μ₂

    throughput = μ₁ (1 − ρᴷ) / (1 − ρᴷ⁺¹) = μ₁ − (μ₁ − μ₂) / (1 − ρ^−(b + 3))

The second form is the loss of a Brownian motion between two barriers (Harrison, "Brownian Motion
and Stochastic Flow Systems", 1985, chapter 5), whose drift is μ₁ − μ₂ and whose variance is given
by the coefficients of variation c₁ and c₂ of the two times. So for other distributions

    ρ becomes ρ^(1/c²), c² = (c₁² + c₂²)/2      and 3 becomes k = √π·c + (3 − √π)·c²

where k is what is exact at c = 1, and, for small c and b = 0, gives the mean of the larger of two
normal times, which is the cycle of a line without room. Simulated lines with gamma times, c from
0.1 to 1.4, b from 0 to 16 and rates up to 1.7 apart, are within 0.015 of the slower side's rate
(`tests/deploy/planner/test_buffer_law.py`).
"""

import math
from dataclasses import dataclass

from deploy.errors import InputError

SYNCHRONOUS = 1.0
"""Batches that are live at η = 0: one, so that the phases take turns."""


@dataclass(frozen=True, slots=True)
class Phase:
    """How long one side takes for a batch when it never waits."""

    seconds: float
    """Mean."""
    variation: float = 0.0
    """Standard deviation over mean."""

    def __post_init__(self) -> None:
        """Refuse what is no time."""
        if not (0 < self.seconds < math.inf and 0 <= self.variation < math.inf):
            raise InputError(
                f"a phase of {self.seconds} s with a variation of {self.variation}: the time must "
                "be above 0 and the variation at least 0"
            )


def batches_per_second(generate: Phase, train: Phase, live: float) -> float:
    """Throughput of the line.

    Args:
        generate: The actors' time for a batch.
        train: The learner's.
        live: Batches that may be live: generated, waiting, or being trained. η + 1, or the window
            in batches where that is less; at least 1. Between 1, where the phases take turns, and
            2, where there is no room between them, it is interpolated.

    Raises:
        InputError: Less than one batch is live, so that none could ever be trained.

    Example:
        >>> phase = Phase(1.0, variation=1.0)
        >>> [round(batches_per_second(phase, phase, live), 4) for live in (1, 2, 3, 4)]
        [0.5, 0.6667, 0.75, 0.8]
    """
    if live < SYNCHRONOUS:
        raise InputError(f"{live} batches are live; at least {SYNCHRONOUS:g} must be")
    in_turn = 1 / (generate.seconds + train.seconds)
    if live < 2:
        overlapped = _line(generate, train, 0.0)
        return in_turn + (live - 1) * (overlapped - in_turn)
    return _line(generate, train, live - 2)


def _line(generate: Phase, train: Phase, room: float) -> float:
    """Both work at once, with room for so many finished batches between them."""
    faster, slower = 1 / generate.seconds, 1 / train.seconds
    if faster < slower:  # the law is the same seen from either end
        faster, slower = slower, faster
    squared = (generate.variation**2 + train.variation**2) / 2
    if not squared:
        return slower
    variation = math.sqrt(squared)
    places = room + math.sqrt(math.pi) * variation + (3 - math.sqrt(math.pi)) * squared
    exponent = places * math.log(faster / slower) / squared
    if exponent < 1e-6:  # the limit of equal rates
        return max(1 / (generate.seconds + train.seconds), slower * (1 - squared / places))
    blocked = (faster - slower) / -math.expm1(-exponent)
    return max(1 / (generate.seconds + train.seconds), faster - blocked)

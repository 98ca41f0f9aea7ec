"""Rates of engines, fitted to the times of their rollouts.

A rollout of L tokens on an engine that ran n at a time, while s of them began or ended, took

    seconds alone + seconds beside a learner that computes / (1 + c) = a·L + b·L·mean(nᵖ) + f·s/2

without pauses for weights. For each c and p the others are a least-squares fit over all rollouts,
none below 0. The mean of nᵖ is over tokens, whose times follow from a and b: both are estimated in
turn. c and p are those of a grid that leave the least error, in turn as well.

The learner waits just when rollouts are slow, so they look slower beside one that waits: c is
rather too small than too large.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deploy.planner.rates import EngineRates, UpdateRates
from headway.errors import InputError
from queues.readers.group_history import GroupTimes
from weight_sync.announcements import WeightUpdateReport

SLOWDOWNS = tuple(step / 20 for step in range(21))
EXPONENTS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 1.1, 1.2)
ROUNDS = 4
"""Rounds in which the rates and the mean of nᵖ over tokens converge, from rates nearby."""
LEAST = 1e-9
"""Smaller seconds count as these, as they are divided by."""

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Timeline:
    """One engine's times, [t], with what holds from each on; and its observed rollouts, [r].

    Times are seconds since the epoch.
    """

    times: Array
    running: Array
    """Number of rollouts."""
    working: Array
    """0 while it stands still for new weights, else 1."""
    learning: Array
    """1 while the learner computes, else 0."""
    began: Array
    ended: Array
    tokens: Array
    edges: Array
    """Beginnings and ends of rollouts of the engine meanwhile, its own too."""

    @classmethod
    def of(cls, rollouts: Array, pauses: Array, steps: Array, ends: Array) -> "Timeline":
        """Return the timeline of rollouts, [n, 3], as begin, end and tokens of each.

        `pauses` and `steps`, [m, 2], are begin and end of pauses of the engine, and of steps of the
        learner. Rollouts that began outside of `ends` load the engine, but are not observed.
        """
        spans = (rollouts[:, :2], pauses, steps)
        times = np.concatenate([span.ravel() for span in spans])
        order = np.argsort(times, kind="stable")
        kinds = np.repeat(np.arange(3), [span.size for span in spans])[order]
        changes = np.where(order % 2 == 0, 1.0, -1.0)  # spans are pairs of begin and end
        running, paused, learning = (np.cumsum(changes * (kinds == kind)) for kind in range(3))
        began, ended, tokens = rollouts[(rollouts[:, 0] > ends[0]) & (rollouts[:, 0] <= ends[-1])].T
        edges = np.sort(rollouts[:, :2].ravel())
        meanwhile = (np.searchsorted(edges, ended) - np.searchsorted(edges, began)).astype(float)
        working = 1.0 - np.minimum(paused, 1.0)
        return cls(times[order], running, working, learning, began, ended, tokens, meanwhile)

    def passed(self, values: Array) -> Array:
        """Integrate what holds from each time on, [t], over each observed rollout, [r]."""
        until = np.concatenate([[0.0], np.cumsum(values[:-1] * np.diff(self.times))])
        integrals: Array
        integrals = np.interp(self.ended, self.times, until)
        integrals -= np.interp(self.began, self.times, until)
        return integrals


@dataclass(frozen=True, slots=True)
class Fit:
    """Rates of engines with one slowdown and exponent, and what they leave over."""

    slowdown: float
    exponent: float
    rates: Array
    """a, b and f."""
    seconds: Array
    """What every observed rollout would have taken alone, without pauses, [r]."""
    expected: Array
    """What it would have taken by the rates, [r]."""
    error: float
    """Sum of squares of the differences, in seconds of the clock."""


def fit_engines(
    groups: Sequence[GroupTimes],
    updates: Sequence[WeightUpdateReport],
    steps: Array,
    ends: Array,
) -> tuple[EngineRates, float, Array]:
    """Fit the rates of an engine, R², and paces, over rollouts that began while batches ended.

    `steps`, [m, 2], has begin and end of every step of the learner; `ends` the ends of the last one
    before the measured ones, and of these. Raises InputError if no rollout began in between.
    """
    timelines = [
        Timeline.of(rollouts, _pauses(updates, engine), steps, ends)
        for engine, rollouts in _rollouts(groups).items()
    ]
    if not sum(len(timeline.tokens) for timeline in timelines):
        raise InputError(
            "no rollout began between the first batches and the last lease: the run was too short"
        )
    clock = np.concatenate([line.passed(line.working) for line in timelines])
    best = _best(timelines, clock)
    puts = [group.accepted_at - max(end for _, end in group.rollouts) for group in groups]
    step, rollout, turnover = best.rates.tolist()
    rates = EngineRates(
        step_seconds=step,
        rollout_step_seconds=rollout,
        exponent=best.exponent,
        turnover_seconds=turnover,
        slowdown=best.slowdown,
        put_seconds=max(0.0, float(np.median(puts))),
    )
    variance = float(np.var(clock)) * len(clock)
    return rates, 1 - best.error / variance if variance else 1.0, _paces(timelines, best, ends)


def fit_pauses(groups: Sequence[GroupTimes], updates: Sequence[WeightUpdateReport]) -> UpdateRates:
    """Fit the seconds of a swap over the rollouts that ran at its begin."""
    seconds, running = [], []
    for engine, rollouts in _rollouts(groups).items():
        pauses = _pauses(updates, engine)
        begun, ended = (np.searchsorted(np.sort(edges), pauses[:, 0]) for edges in rollouts.T[:2])
        seconds.append(pauses[:, 1] - pauses[:, 0])
        running.append(begun - ended)
    if not seconds or not np.concatenate(seconds).size:
        return UpdateRates()
    counts = np.concatenate(running).astype(float)
    factors = np.stack([np.ones_like(counts), counts], axis=1)
    pause, rollout = least_squares(factors, np.concatenate(seconds)).tolist()
    return UpdateRates(pause_seconds=pause, pause_rollout_seconds=rollout)


def least_squares(factors: Array, values: Array) -> Array:
    """Fit coefficients, none below 0, by least squares over all subsets of the factors."""
    width = factors.shape[1]
    best, least = np.zeros(width), float(np.sum(values**2))
    for subset in map(
        list, chain.from_iterable(combinations(range(width), size) for size in range(width, 0, -1))
    ):
        fitted, *_ = np.linalg.lstsq(factors[:, subset], values, rcond=None)
        error = float(np.sum((values - factors[:, subset] @ fitted) ** 2))
        if np.all(fitted >= 0) and error < least:
            least, best = error, np.zeros(width)
            best[subset] = fitted
            if len(subset) == width:
                break  # the others can only leave more
    return best


def _rollouts(groups: Sequence[GroupTimes]) -> dict[str, Array]:
    """Return begin, end and tokens of the rollouts of each engine, [n, 3]."""
    rollouts: defaultdict[str, list[tuple[float, float, int]]] = defaultdict(list)
    for group in groups:
        pairs = zip(group.rollouts, group.tokens, strict=True)
        rollouts[group.engine_id] += [(*times, tokens) for times, tokens in pairs]
    return {engine: np.array(rows) for engine, rows in rollouts.items()}


def _pauses(updates: Sequence[WeightUpdateReport], engine: str) -> Array:
    """Return begin and end of the swaps of an engine, [m, 2]."""
    pauses: list[Any] = [
        (update.swap_started_at, update.swap_finished_at)
        for update in updates
        if update.engine_id == engine and update.swap_finished_at is not None
    ]
    return np.array(pauses, dtype=float).reshape(-1, 2)


def _best(timelines: Sequence[Timeline], clock: Array) -> Fit:
    """Fit slowdown and exponent, each in turn; `clock`, [r], has the seconds of every rollout."""
    best = _fitted(timelines, clock, 0.0, 1.0, np.array([1.0, 0.0, 0.0]))
    tried = [
        *((slowdown, None) for slowdown in SLOWDOWNS),
        *((None, exponent) for exponent in EXPONENTS),
        *((slowdown, None) for slowdown in SLOWDOWNS),
    ]
    for slowdown, exponent in tried:
        pair = best.slowdown if slowdown is None else slowdown, exponent or best.exponent
        best = min(best, _fitted(timelines, clock, *pair, best.rates), key=lambda fit: fit.error)
    return best


def _paces(timelines: Sequence[Timeline], fit: Fit, ends: Array) -> Array:
    """Return for each batch what its rollouts took, in units of what they were expected to."""
    middles = np.concatenate([(line.began + line.ended) / 2 for line in timelines])
    batch = np.searchsorted(ends[1:-1], middles)
    took, expected = (
        np.bincount(batch, seconds, minlength=len(ends) - 1)
        for seconds in (fit.seconds, fit.expected)
    )
    return np.divide(took, expected, out=np.ones_like(expected), where=expected > 0)


def _fitted(
    timelines: Sequence[Timeline], clock: Array, slowdown: float, exponent: float, rates: Array
) -> Fit:
    """Fit a, b and f with a slowdown and an exponent, from rates nearby."""
    for _ in range(ROUNDS):
        parts = [_observations(line, slowdown, exponent, rates) for line in timelines]
        factors, seconds = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        rates = least_squares(factors, seconds)
        if not rates[:2].any():  # rollouts of one length: turnover alone may explain them
            rates = np.append(least_squares(factors[:, :2], seconds), 0.0)
    expected = factors @ rates
    slow = clock / np.maximum(seconds, LEAST)
    error = float(np.sum(((seconds - expected) * slow) ** 2))
    return Fit(slowdown, exponent, rates, seconds, expected, error)


def _observations(
    line: Timeline, slowdown: float, exponent: float, rates: Array
) -> tuple[Array, Array]:
    """Return factors (L, L·mean(nᵖ), s/2), [r, 3], and seconds, [r], of observed rollouts."""
    counting = line.working / (1 + slowdown * line.learning)
    load = np.maximum(line.running, 1.0) ** exponent
    speed = counting / np.maximum(rates[0] + rates[1] * load, LEAST)
    mean_load = line.passed(load * speed) / np.maximum(line.passed(speed), LEAST)
    factors = np.stack([line.tokens, line.tokens * mean_load, line.edges / 2], axis=1)
    return factors, line.passed(counting)

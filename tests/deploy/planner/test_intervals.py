"""Intervals of predictions: what they are drawn from, and how often a run lies inside."""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from deploy.planner.rates import EngineRates, LearnerRates, Rates, redrawn
from deploy.planner.simulator import lag_figures, simulate
from deploy.planner.throughput import FIGURES, intervals
from tests.deploy.planner.test_simulator import setting

RATES = Rates(
    engine=EngineRates(step_seconds=0.01),
    learner=LearnerRates(batch_seconds=1.0),
    lengths=((95,), (105,), (100,), (90,), (110,)),
)


def drifting(count, chance, *, memory=0.8, spread=0.1):
    """Return paces that stay high or low for some batches, of both sides apart."""
    sides = []
    for _ in range(2):
        values = [chance.gauss(0, 1)]
        while len(values) < count:
            values.append(memory * values[-1] + (1 - memory**2) ** 0.5 * chance.gauss(0, 1))
        sides.append([1 + spread * value for value in values])
    return [*zip(*sides, strict=True)]


@pytest.mark.parametrize("memory", [0.0, 0.6])
def test_paces_that_are_drawn_have_mean_spread_and_memory_of_the_measured_ones(memory):
    paces = drifting(400, random.Random(0), memory=memory)
    drawn = np.array(redrawn(paces, 4000, np.random.default_rng(0)))
    assert drawn.mean(axis=0) == pytest.approx(np.mean(paces, axis=0), abs=0.02)
    assert drawn.std(axis=0) == pytest.approx(np.std(paces, axis=0), rel=0.15)
    neighbours = [np.corrcoef(side[1:], side[:-1])[0, 1] for side in drawn.T]
    assert neighbours == pytest.approx([memory] * 2, abs=0.12)


def test_the_same_seed_draws_the_same_rates():
    rates = replace(RATES, paces=drifting(30, random.Random(0)))
    drawn = rates.resampled(50, seed=1)
    assert drawn == rates.resampled(50, seed=1) != rates.resampled(50, seed=2)
    assert len(drawn.paces) == 50
    assert drawn.paces[0] == pytest.approx((0.892922, 1.072273), rel=1e-5)
    assert set(drawn.lengths) <= set(RATES.lengths)
    assert (drawn.engine, drawn.learner) == (RATES.engine, RATES.learner)


def test_an_interval_of_rates_that_never_vary_is_a_point():
    steady = replace(RATES, lengths=((100,),))
    for low, median, high in intervals(setting(2), steady, seed=0).values():
        assert low == median == high


def test_both_sides_work_at_the_pace_of_the_batch():
    slow = replace(RATES, lengths=((100,),), paces=[(2.0, 1.5)])
    assert simulate(setting(0), slow).samples_per_second == pytest.approx(1 / (2.0 + 1.5))


def test_nineteen_of_twenty_runs_lie_inside_of_intervals_predicted_from_other_runs():
    """Engine and learner are equally fast, so that lag is a walk between 1 and the bound."""
    chance, inside = random.Random(5), Counter()
    wide, trials = setting(8, steps=30, slots=2), 20
    for trial in range(trials):
        measured = replace(RATES, paces=drifting(60, chance))
        outcome = simulate(wide, replace(RATES, paces=drifting(30, chance)))
        for name, (low, _, high) in intervals(wide, measured, seed=trial).items():
            inside[name] += low <= getattr(outcome, name) <= high
    shares = {name: inside[name] / trials for name in FIGURES}
    assert min(shares.values()) >= 0.85, shares
    assert sum(shares.values()) / len(shares) >= 0.9, shares


def test_figures_of_lags_are_over_tokens():
    lags = Counter({0: 50, 3: 45, 7: 5})
    figures = {"lag_mean": 1.7, "lag_p50": 0, "lag_p95": 3, "lag_max": 7}
    assert lag_figures(lags) == figures

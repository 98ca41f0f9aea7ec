"""Scores over problems: golden values, estimators against all subsets, coverage of intervals."""

import random
from itertools import combinations, product
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.report.score_intervals import (
    Verdict,
    best_at_k,
    mean_score,
    pass_at_k,
    position_bias,
    win_rate,
)

SHARES = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=30)


@pytest.mark.parametrize(
    ("passed", "n", "low", "high"),
    [  # Wilson's interval, as R's prop.test(correct = FALSE) and statsmodels have it
        (0, 10, 0.0, 0.27753),
        (5, 10, 0.23659, 0.76341),
        (9, 10, 0.59585, 0.98212),
        (10, 10, 0.72247, 1.0),
        (734, 1000, 0.70576, 0.76045),
    ],
)
def test_zeros_and_ones_have_wilsons_interval(passed, n, low, high):
    score = mean_score([1.0] * passed + [0.0] * (n - passed))
    assert (score["value"], score["n"]) == (passed / n, n)
    assert (score["low"], score["high"]) == pytest.approx((low, high), abs=2e-5)


@given(SHARES, st.integers(1, 8))
def test_an_interval_holds_the_mean_and_never_narrows_beyond_one_problem_a_rollout(values, many):
    score = mean_score(values, rollouts=many)
    assert 0 <= score["low"] <= score["value"] <= score["high"] <= 1
    alone, most = mean_score(values), mean_score(values * many)
    least, width, widest = (it["high"] - it["low"] for it in (most, score, alone))
    assert least - 1e-9 <= width <= widest + 1e-9


@pytest.mark.parametrize("problems", [20, 100])
@pytest.mark.parametrize("spread", [(0.0, 1.0), (0.02, 0.3), (0.5, 0.5), (0.9, 1.0)])
def test_intervals_over_several_rollouts_hold_the_truth_in_19_of_20_cases(problems, spread):
    draw, hits = random.Random(0), 0
    for _ in range(400):
        chances = [draw.uniform(*spread) for _ in range(problems)]
        shares = [fmean(draw.random() < chance for _ in range(4)) for chance in chances]
        score = mean_score(shares, rollouts=4)
        hits += score["low"] <= fmean(spread) <= score["high"]
    assert hits / 400 >= 0.92


def test_rewards_without_bounds_have_the_interval_of_the_normal_distribution():
    score = mean_score([-1.0, 1.0, 3.0], bounded=False)
    expected = {"value": 1.0, "low": -1.26316, "high": 3.26316, "n": 3}
    assert score == pytest.approx(expected, abs=1e-4)
    assert mean_score([2.0], bounded=False) == {"value": 2.0, "low": None, "high": None, "n": 1}


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), min_size=1, max_size=7), st.data())
def test_pass_and_best_at_k_are_means_over_all_sets_of_k(rollouts, data):
    k = data.draw(st.integers(1, len(rollouts)))
    sets = [*combinations(rollouts, k)]

    def chosen(group):
        best = max(mark for _, mark in group)
        return fmean(correct for correct, mark in group if mark == best)

    correct, marks = zip(*rollouts, strict=True)
    assert pass_at_k(correct, k) == pytest.approx(fmean(any(c for c, _ in s) for s in sets))
    assert best_at_k(correct, marks, k) == pytest.approx(fmean(map(chosen, sets)))
    assert best_at_k(correct, correct, k) == pytest.approx(pass_at_k(correct, k))


def test_pass_at_k_has_the_values_of_the_paper():
    assert pass_at_k([True] * 3 + [False] * 7, 1) == pytest.approx(0.3)
    assert pass_at_k([True] * 3 + [False] * 7, 5) == pytest.approx(1 - 21 / 252)
    assert pass_at_k([True] * 3 + [False] * 7, 8) == 1


def test_a_comparison_is_won_where_both_orders_say_so_and_else_a_tie():
    marks = [0.0, 0.5, 1.0]
    won = {(1.0, 0.0): 1.0, (0.0, 1.0): 0.0}
    verdicts = [Verdict(*pair) for pair in product(marks, marks)]
    assert [v.outcome for v in verdicts] == [won.get(tuple(v), 0.5) for v in verdicts]
    assert {tuple(v) for v in verdicts if v.agrees} == {(1.0, 0.0), (0.0, 1.0), (0.5, 0.5)}
    score = win_rate([[verdict] for verdict in verdicts])
    expected = {"value": 0.5, "n": 9, "wins": 1, "ties": 7, "losses": 1}
    assert score.items() >= expected.items()
    assert score["agreement"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("marks", "first", "agreement"),
    [
        ([(1.0, 1.0)] * 20, 1.0, 0.0),  # whatever is first
        ([(0.0, 0.1)] * 20, 0.0, 0.0),
        ([(1.0, 0.0), (0.0, 0.7)] * 10, 0.5, 1.0),
        ([(0.5, 0.5)] * 20, 0.5, 1.0),
        ([(0.6, 0.5)] * 20, 0.75, 0.0),
    ],
)
def test_a_judge_without_a_bias_prefers_what_is_first_half_of_the_time(marks, first, agreement):
    verdicts = [[Verdict(*pair)] for pair in marks]
    bias = position_bias(verdicts)
    values = {"first_preferred": first, "agreement": agreement}
    for name, value in values.items():
        assert bias[name] == mean_score([value] * 20) | {"n": 20}
    if agreement == 0:
        score = win_rate(verdicts)
        assert (score["value"], score["ties"], score["agreement"]) == (0.5, 20, 0.0)
    several = position_bias([[Verdict(1.0, 1.0)] * 3, [Verdict(1.0, 0.0)]])
    assert (several["first_preferred"]["value"], several["agreement"]["value"]) == (0.75, 0.5)
    assert several["agreement"]["n"] == 2, "one for each problem"

"""The comparison of engines: its units, its ranks by enumeration, and what it leaves out."""

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rollouts import PlainEngine, group, random_groups, rollout

from learner.batch.batch import read_batch
from learner.config.learner import LearnerConfig
from learner.diagnostics.batch_report import BatchReport
from learner.diagnostics.engine_comparison import Unit, compare, measure, units
from learner.update import Updater


def by_engine(groups, *engines):
    """Return the groups as if engines had sampled them, one after the other in turn."""
    return [
        dataclasses.replace(
            item, rollouts=[dataclasses.replace(one, engine_id=engine) for one in item.rollouts]
        )
        for item, engine in zip(groups, itertools.cycle(engines), strict=False)
    ]


def scores_of_all_assignments(values, own):
    """Return the score of every way to give `own` of the values to one engine."""
    indices = range(len(values))
    for chosen in itertools.combinations(indices, own):
        mine = [values[i] for i in chosen]
        others = [values[i] for i in indices if i not in chosen]
        yield compare([(mine, others)])


@pytest.mark.parametrize(("total", "own"), [(2, 1), (4, 2), (5, 1), (6, 3), (9, 4)])
def test_engines_that_are_alike_have_score_0_and_variance_1_and_thin_tails(total, own):
    scores, ratios = zip(*scores_of_all_assignments(range(1, total + 1), own), strict=True)
    count = len(scores)
    assert sum(scores) / count == pytest.approx(0)
    assert sum(score**2 for score in scores) / count == pytest.approx(1)
    for t in (0.5, 1.0, 2.0):
        assert sum(math.exp(t * score) for score in scores) / count <= math.exp(t * t / 2)
    assert sum(map(math.log, ratios)) / count == pytest.approx(0)


def test_strata_add_up_to_variance_1_and_ties_to_less():
    pairs = itertools.product(
        itertools.combinations(range(4), 2), itertools.combinations(range(3), 1)
    )
    scores = [
        compare([
            ([float(i) for i in one], [float(i) for i in range(4) if i not in one]),
            ([float(i) for i in two], [float(i) for i in range(3) if i not in two]),
            ([1.0], []),
        ])[0]
        for one, two in pairs
    ]  # fmt: skip
    assert sum(score**2 for score in scores) / len(scores) == pytest.approx(1)
    assert compare([([1.0, 1.0], [1.0])]) == (0.0, 1.0)


@given(st.lists(st.floats(0, 1e3), min_size=2, max_size=8), st.floats(1e-3, 1e3))
def test_the_score_depends_on_the_order_of_values_alone(values, scale):
    half = len(values) // 2
    score, _ = compare([(values[:half], values[half:])])
    scaled = [value * scale for value in values]
    order = [sorted(set(scaled)).index(value) for value in scaled]
    assert compare([(order[:half], order[half:])])[0] == pytest.approx(
        compare([(scaled[:half], scaled[half:])])[0]
    )
    if len(set(scaled)) == len(set(values)):  # else two of them were rounded to one
        assert compare([(scaled[:half], scaled[half:])])[0] == pytest.approx(score)


def test_the_ratio_is_one_of_geometric_means_and_ignores_rounding():
    assert compare([([2.0, 8.0], [1.0, 1.0])])[1] == pytest.approx(4.0, rel=1e-4)
    assert compare([([1e-7], [1e-9])])[1] == pytest.approx(1.0, rel=0.02)
    assert compare([([1.0], []), ([], [2.0])]) == (None, None)


def test_units_are_tokens_of_one_group_one_engine_and_one_version_without_old_caches():
    made = [
        rollout([1, 2, 3, 4, 5], versions=[7, 7, 7]),
        rollout([1, 2, 3, 4, 5], versions=[5, 7, 7], index=1),
        rollout([1, 2, 3], versions=[7], mask=[False, False, False], index=2),
        rollout([1, 2, 3, 4], versions=[7, 7], index=3),
    ]
    made[3] = dataclasses.replace(made[3], engine_id="engine-1")
    batch = read_batch([group("g0", made[:3]), group("g1", made[3:])])
    tokens = batch.tokens
    found, column = units(
        tokens.versions, tokens.mask, tokens.sequence_ids, tokens.group_ids, batch.engines,
        version=7,
    )  # fmt: skip
    assert found == [Unit("engine-0", 0, 0), Unit("engine-0", 0, 2), Unit("engine-1", 1, 0)]
    none = -1
    assert column.tolist() == [
        none, none, 0, 0, 0,
        none, none, 1, none, none,
        none, none, none,
        none, none, 2, 2,
    ]  # fmt: skip


def test_sums_of_units_take_what_counts_and_has_a_unit():
    sums = measure(
        torch.tensor([0.5, -0.25, 9.0, 9.0]),
        torch.tensor([True, True, False, True]),
        torch.tensor([1, 1, 1, -1]),
        torch.tensor([math.log(0.5), math.log(0.75), -1.0, -1.0]),
        count=2,
    )
    assert sums.tokens.tolist() == [0, 2]
    assert sums.difference.tolist() == [0, 0.75]
    assert sums.uncertainty.tolist() == pytest.approx([0, 0.75])


@pytest.mark.parametrize("settings", [{}, {"epochs": 2}, {"minibatches": 2}])
def test_the_figures_of_engines_add_up_to_those_of_the_batch(settings):
    groups = by_engine(random_groups(count=6), "engine-0", "engine-1", "engine-2")
    config = LearnerConfig(loss="cispo", microbatch_tokens=40, **settings)
    report = Updater(PlainEngine(), config).update(groups, 0)
    assert report.engines.keys() == {"engine-0", "engine-1", "engine-2"}
    fresh = report.origins["fresh"]
    parts = report.engines.values()
    assert sum(part.tokens_fresh for part in parts) == fresh.tokens
    total = sum(part.mismatch_fresh * part.tokens_fresh for part in parts)
    assert total / fresh.tokens == pytest.approx(fresh.mismatch)
    assert all(part.rank_score is not None for part in parts)
    row = report.to_dict()
    assert row["engines"]["engine-1"]["tokens_fresh"] == report.engines["engine-1"].tokens_fresh
    assert BatchReport.from_dict(row) == report


def test_engines_are_compared_at_equal_lags_alone():
    """One engine's rollouts are all a version older, as if it always came last."""
    fresh, stale = random_groups(count=4, version=5), random_groups(count=4, version=4, seed=1)
    config = LearnerConfig(loss="cispo", microbatch_tokens=64)
    groups = [*by_engine(fresh, "engine-0"), *by_engine(stale, "engine-1")]
    report = Updater(PlainEngine(), config).update(groups, 5)
    assert {part.rank_score for part in report.engines.values()} == {None}
    assert report.engines["engine-1"].mismatch_fresh is None
    assert report.engines["engine-0"].mismatch_fresh > 0

"""Off-policyness: ESS, lags, origins, KL."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.diagnostics.off_policy import (
    BIN_EDGES,
    SEQUENCE_BOUND,
    Origin,
    effective_sample_size,
    figures,
    group_lag_histogram,
    measure,
    origins,
)
from learner.losses.kl import k3
from learner.losses.loss_inputs import LOG_RATIO_BOUND, Segments

ALL = torch.ones(4, dtype=torch.bool)


def flat(found):
    """Figures by name, those of an origin as `<figure>_<origin>`."""
    row = dict(vars(found))
    for origin, figures_of_origin in row.pop("origins").items():
        row |= {f"{name}_{origin}": value for name, value in vars(figures_of_origin).items()}
    return row


def figures_of(log_ratios, sequence_ids=None, origin=None, mask=None, **options):
    """Return the report of fresh tokens, each a rollout of its own."""
    ids = torch.arange(len(log_ratios)) if sequence_ids is None else sequence_ids
    mask = torch.ones(len(ids), dtype=torch.bool) if mask is None else mask
    origin = torch.zeros(len(ids), dtype=torch.int64) if origin is None else origin
    return figures(measure(log_ratios, mask, origin, ids), **options)


@pytest.mark.parametrize(("weights", "expected"), [([1, 1, 1, 1], 4), ([4, 0, 0, 0], 1)])
def test_effective_sample_size_of_the_textbook_cases(weights, expected):
    log_ratios = torch.tensor(weights).log()
    assert effective_sample_size(log_ratios, ALL) == pytest.approx(expected)


@given(logs=st.lists(st.floats(-500, 500), min_size=1, max_size=8), shift=st.floats(-300, 300))
def test_effective_sample_size_is_bounded_and_blind_to_scale(logs, shift):
    logs = torch.tensor(logs, dtype=torch.float64)
    mask = torch.ones(len(logs), dtype=torch.bool)
    found = effective_sample_size(logs, mask)
    assert 1 - 1e-9 <= found <= len(logs) + 1e-9
    assert effective_sample_size(logs + shift, mask) == pytest.approx(found, rel=1e-6)


def test_effective_sample_size_ignores_masked_tokens_and_is_zero_without_any():
    logs = torch.tensor([0.0, math.nan, 0.0, 80.0])
    assert effective_sample_size(logs, torch.tensor([True, False, True, False])) == 2.0
    assert effective_sample_size(logs, torch.zeros(4, dtype=torch.bool)) == 0.0


def test_rollouts_are_told_apart_by_who_sampled_them():
    versions = torch.tensor([-1, 5, 5, -1, 4, 5, -1, 4, 4, -1, -1])
    sequences = torch.tensor([7, 7, 7, 2, 2, 2, 3, 3, 3, 1, 1])
    found = origins(versions, versions >= 0, sequences, version=5)
    fresh, crossed, stale = Origin.FRESH, Origin.CROSSED, Origin.STALE
    assert found.tolist() == [fresh] * 3 + [crossed] * 3 + [stale] * 3 + [fresh] * 2


def test_a_rollout_that_crossed_an_older_update_counts_as_crossed():
    versions = torch.tensor([1, 2])
    found = origins(versions, versions >= 0, torch.zeros(2).long(), version=9)
    assert found.tolist() == [Origin.CROSSED] * 2


def test_a_group_lags_by_its_oldest_token_and_counts_once():
    versions = torch.tensor([-1, 5, 2, 4, -1, 5, 5, 3])
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 2, 9])
    mask = versions >= 0
    assert group_lag_histogram(versions, mask, groups, version=5) == {0: 2, 2: 1, 3: 1}
    mask[2] = False
    assert group_lag_histogram(versions, mask, groups, version=5) == {0: 2, 1: 1, 2: 1}
    assert group_lag_histogram(versions, mask & False, groups, version=5) == {}


@given(log_ratio=st.floats(-100, 100))
def test_k3_is_finite_and_never_negative(log_ratio):
    value = k3(torch.tensor([log_ratio], dtype=torch.float64)).item()
    assert 0 <= value < math.inf


def test_figures_keep_the_origins_apart():
    log_ratios = torch.tensor([0.1, -0.3, 0.5, 9.0])
    mask = torch.tensor([True, True, True, False])
    origin = torch.tensor([Origin.FRESH, Origin.FRESH, Origin.STALE, Origin.CROSSED])
    found = figures_of(log_ratios, torch.tensor([0, 0, 1, 1]), origin, mask, passes=1)
    tokens = {origin: figures.tokens for origin, figures in found.origins.items()}
    assert tokens == {"fresh": 2, "stale": 1, "crossed": 0}
    assert found.origins["fresh"].mismatch == pytest.approx(0.2)
    assert found.origins["stale"].mismatch == pytest.approx(0.5)
    assert found.origins["crossed"].mismatch is None
    assert found.origins["stale"].kl == pytest.approx(math.exp(0.5) - 1.5)
    assert found.origins["crossed"].kl is None
    assert found.mismatch == pytest.approx(0.3)
    assert found.ratio_mean == pytest.approx(sum(map(math.exp, (0.1, -0.3, 0.5))) / 3)
    twice = figures_of(log_ratios, torch.tensor([0, 0, 1, 1]), origin, mask, passes=2)
    assert twice.origins["fresh"].tokens == 1


def test_effective_sample_size_of_rollouts_is_that_of_the_products():
    make = torch.Generator().manual_seed(0)
    log_ratios = 0.3 * torch.randn(40, generator=make)
    ids = torch.randint(6, (40,), generator=make)
    mask = torch.rand(40, generator=make) < 0.8
    found = figures_of(log_ratios, ids, mask=mask)
    assert found.ess == pytest.approx(effective_sample_size(log_ratios, mask) / int(mask.sum()))
    products = Segments(ids[mask]).sums(log_ratios[mask])
    expected = effective_sample_size(products, torch.ones(6, dtype=torch.bool)) / 6
    assert found.ess_sequence == pytest.approx(expected)
    assert found.ess_sequence < found.ess
    assert found.sequence_clamped == 0


def test_products_too_large_to_square_are_bounded_and_counted():
    log_ratios = torch.full((200,), -LOG_RATIO_BOUND)
    log_ratios[:100] = LOG_RATIO_BOUND
    ids = torch.arange(200) // 50
    found = figures_of(log_ratios, ids)
    assert 50 * LOG_RATIO_BOUND > SEQUENCE_BOUND
    assert found.sequence_clamped == 1.0
    assert found.ess_sequence == pytest.approx(0.5)
    assert all(math.isfinite(value) for value in flat(found).values() if value is not None)
    lowest = figures_of(log_ratios[100:], ids[100:])
    assert lowest.ess_sequence == pytest.approx(1.0)


def test_on_policy_everything_is_at_its_ideal():
    found = flat(figures_of(torch.zeros(5), torch.tensor([0, 0, 1, 1, 1])))
    for name in ("ess", "ess_sequence", "ratio_mean"):
        assert found[name] == 1.0
    for name in ("chi2", "mismatch", "kl", "mismatch_fresh", "kl_fresh", "sequence_clamped"):
        assert found[name] == 0.0
    for name in ("ratio_min", "ratio_p1", "ratio_p99", "ratio_max"):
        assert found[name] == pytest.approx(1.0, abs=2e-5)


def test_chi2_and_kl_average_to_the_exact_divergences():
    behavior = torch.tensor([4, 3, 2, 1], dtype=torch.float64) / 10
    current = torch.tensor([1, 2, 3, 4], dtype=torch.float64) / 10
    drawn = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2, 3])
    found = figures_of((current / behavior).log()[drawn])
    assert found.chi2 == pytest.approx((current**2 / behavior).sum().item() - 1)
    assert found.kl == pytest.approx((behavior * (behavior / current).log()).sum().item())
    assert found.ratio_mean == pytest.approx(1.0)


@given(
    logs=st.lists(st.floats(-20, 20), min_size=1, max_size=60),
    cut=st.integers(0, 60),
)
def test_figures_of_parts_added_up_are_those_of_the_whole(logs, cut):
    logs = torch.tensor(logs, dtype=torch.float64)
    ids, origin = torch.arange(len(logs)) // 3, torch.arange(len(logs)) % 3
    mask = torch.arange(len(logs)) % 5 != 4
    cut = 3 * (cut // 3)
    parts = [measure(logs[s], mask[s], origin[s], ids[s]) for s in (slice(cut), slice(cut, None))]
    whole = flat(figures(measure(logs, mask, origin, ids)))
    assert flat(figures(parts[0] + parts[1])) == pytest.approx(whole)


@given(logs=st.lists(st.floats(-19.9, 19.9), min_size=1, max_size=80))
def test_quantiles_and_extremes_are_within_a_bin_of_the_exact_ones(logs):
    found = figures_of(torch.tensor(logs, dtype=torch.float64))
    logs = sorted(logs)

    def near(ratio, exact):
        """Whether log `ratio` is in the bin of `exact`, of which an edge may be in either."""
        rounding = 1e-9
        low = max(edge for edge in BIN_EDGES if edge < exact - rounding)
        high = min(edge for edge in BIN_EDGES if edge > exact + rounding)
        return low - rounding <= math.log(ratio) <= high + rounding

    assert near(found.ratio_min, logs[0])
    assert near(found.ratio_max, logs[-1])
    assert found.ratio_min <= math.exp(logs[0]) * (1 + 1e-9)
    assert found.ratio_max >= math.exp(logs[-1]) * (1 - 1e-9)
    # The smallest value that at least the share q of all values does not exceed.
    assert near(found.ratio_p1, logs[math.ceil(0.01 * len(logs)) - 1])
    assert near(found.ratio_p99, logs[math.ceil(0.99 * len(logs)) - 1])


def test_bins_are_symmetric_ascending_and_reach_the_bound_of_log_ratios():
    assert list(BIN_EDGES) == sorted(BIN_EDGES)
    assert [-edge for edge in reversed(BIN_EDGES)] == list(BIN_EDGES)
    assert BIN_EDGES[-1] == pytest.approx(LOG_RATIO_BOUND)
    sums = measure(torch.tensor([0.0, 50.0, -50.0, 1e-6]), ALL, torch.zeros(4).long(), ALL.long())
    assert sums.log_ratio_bins.sum() == 4
    assert [sums.log_ratio_bins[i].item() for i in (0, -1, len(BIN_EDGES) // 2 - 1)] == [1, 1, 2]


def test_without_tokens_there_is_nothing_to_report():
    found = figures_of(torch.tensor([math.nan, math.inf]), mask=torch.zeros(2, dtype=torch.bool))
    counts = {name: value for name, value in flat(found).items() if value is not None}
    assert counts == {"tokens_fresh": 0, "tokens_crossed": 0, "tokens_stale": 0}

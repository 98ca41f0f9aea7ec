"""Off-policyness: ESS, lags, origins, KL."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.offpolicyness import (
    Origin,
    effective_sample_size,
    k3,
    lag_histogram,
    measure,
    origins,
)

ALL = torch.ones(4, dtype=torch.bool)


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
    assert (
        origins(versions, versions >= 0, torch.zeros(2).long(), version=9).tolist()
        == [Origin.CROSSED] * 2
    )


def test_lags_are_counted_by_token():
    versions = torch.tensor([-1, 5, 5, 4, 2])
    assert lag_histogram(versions, versions >= 0, version=5) == {0: 2, 1: 1, 3: 1}
    assert lag_histogram(versions, torch.zeros(5, dtype=torch.bool), version=5) == {}


def test_k3_averages_to_the_exact_divergence():
    behavior = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    current = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    exact = (behavior * (behavior / current).log()).sum()
    assert (behavior * k3((current / behavior).log())).sum() == pytest.approx(exact.item())


@given(log_ratio=st.floats(-100, 100))
def test_k3_is_finite_and_never_negative(log_ratio):
    value = k3(torch.tensor([log_ratio], dtype=torch.float64)).item()
    assert 0 <= value < math.inf


def test_sums_keep_the_origins_apart():
    log_ratios = torch.tensor([0.1, -0.3, 0.5, 9.0])
    mask = torch.tensor([True, True, True, False])
    origin = torch.tensor([Origin.FRESH, Origin.FRESH, Origin.STALE, Origin.CROSSED])
    sums = {name: value.item() for name, value in measure(log_ratios, mask, origin).items()}
    assert (sums["fresh_tokens"], sums["stale_tokens"]) == (2, 1)
    assert sums["crossed_tokens"] == 0
    assert sums["fresh_difference"] == pytest.approx(0.4)
    assert sums["stale_difference"] == pytest.approx(0.5)
    assert sums["stale_k3"] == pytest.approx(math.exp(0.5) - 1.5)
    assert sums["ratio"] == pytest.approx(sum(math.exp(x) for x in (0.1, -0.3, 0.5)))

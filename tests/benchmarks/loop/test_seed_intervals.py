"""Means over seeds with Student's intervals."""

import pytest

from benchmarks.loop.seed_intervals import estimate, estimate_ratio, t_quantile


@pytest.mark.parametrize(
    ("probability", "freedom", "table"),
    [(0.975, 1, 12.706), (0.975, 4, 2.776), (0.95, 9, 1.833), (0.975, 120, 1.980)],
)
def test_quantiles_of_students_distribution_are_those_of_the_tables(probability, freedom, table):
    assert t_quantile(probability, freedom) == pytest.approx(table, abs=6e-4)


def test_the_interval_of_five_seeds_is_students():
    value = estimate([-0.02, None, -0.01, 0.0, 0.01, 0.02])
    assert value.high == -value.low == pytest.approx(2.7764 * 0.0158114 / 5**0.5, rel=1e-4)
    assert (value.mean, value.seeds) == (0.0, 5)
    assert value.text("+.3f") == "+0.000 [-0.020, +0.020]"


def test_a_ratio_and_its_inverse_have_inverse_intervals():
    one, other = (
        estimate_ratio(values) for values in ([0.5, 1.0, 2.0, 4.0], [2.0, 1.0, 0.5, 0.25])
    )
    assert one.mean == pytest.approx(2**0.5)
    assert [one.mean, one.low, one.high] == pytest.approx(
        [1 / x for x in (other.mean, other.high, other.low)]
    )
    assert estimate_ratio([]) is None
    assert estimate_ratio([4.0, 1.0]) == (2.0, None, None, 2)


def test_no_interval_is_claimed_of_two_seeds():
    assert estimate([0.5, 1.0]) == (0.75, None, None, 2)
    assert estimate([0.5, 1.0]).text(".3f") == "0.750"
    assert estimate([None]) is None

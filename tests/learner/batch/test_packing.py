"""Packing and balancing: nothing lost, bounds kept, the same answer every time."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import InputError
from learner.batch.packing import balance, pack

LENGTHS = st.lists(st.integers(1, 60), max_size=40)


@given(lengths=LENGTHS, capacity=st.integers(1, 50))
def test_every_sequence_is_in_exactly_one_row(lengths, capacity):
    rows = pack(lengths, capacity)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(row == sorted(row) for row in rows)


@given(lengths=LENGTHS, capacity=st.integers(1, 50))
def test_a_row_is_within_the_capacity_or_holds_one_long_sequence(lengths, capacity):
    for row in pack(lengths, capacity):
        assert len(row) == 1 or sum(lengths[i] for i in row) <= capacity


@given(lengths=LENGTHS, capacity=st.integers(1, 50))
def test_no_two_rows_would_fit_into_one(lengths, capacity):
    rows = [sum(lengths[i] for i in row) for row in pack(lengths, capacity)]
    assert all(one + other > capacity for one, other in combinations(rows, 2))


def test_the_tightest_row_is_taken():
    assert pack([6, 7, 3, 4], capacity=10) == [[1, 2], [0, 3]]


def test_a_long_sequence_has_a_row_of_its_own():
    assert pack([2, 99, 2], capacity=10) == [[1], [0, 2]]


def test_nothing_packs_into_no_rows():
    assert pack([], capacity=10) == []


@given(lengths=LENGTHS, ranks=st.integers(1, 6))
def test_shares_hold_everything_once(lengths, ranks):
    shares = balance(lengths, ranks)
    assert len(shares) == ranks
    assert sorted(i for share in shares for i in share) == list(range(len(lengths)))


@given(lengths=LENGTHS, ranks=st.integers(1, 6))
def test_shares_differ_by_one_item_at_most(lengths, ranks):
    loads = [sum(lengths[i] for i in share) for share in balance(lengths, ranks)]
    assert max(loads) - min(loads) <= max(lengths, default=0)


def test_ties_are_broken_by_order():
    assert balance([1, 1, 1, 1], 2) == [[0, 2], [1, 3]]


def test_capacity_and_ranks_must_be_positive():
    with pytest.raises(InputError, match="capacity must be at least 1 token, found 0"):
        pack([1], 0)
    with pytest.raises(InputError, match="ranks must be at least 1, found 0"):
        balance([1], 0)

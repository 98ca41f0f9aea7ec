"""Packing and balancing: nothing lost, bounds kept, the same answer every time."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import InputError
from learner.batch.packing import balance, pack

LENGTHS = st.lists(st.integers(1, 60), max_size=40)


@given(lengths=LENGTHS, capacity=st.integers(1, 50))
def test_rows_hold_every_sequence_once_within_the_capacity_and_no_two_would_fit_into_one(
    lengths, capacity
):
    rows = pack(lengths, capacity)
    sizes = [sum(lengths[i] for i in row) for row in rows]
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(row == sorted(row) for row in rows)
    assert all(len(row) == 1 or size <= capacity for row, size in zip(rows, sizes, strict=True))
    assert all(one + other > capacity for one, other in combinations(sizes, 2))


@pytest.mark.parametrize(
    ("lengths", "rows"),
    [([6, 7, 3, 4], [[1, 2], [0, 3]]), ([2, 99, 2], [[1], [0, 2]]), ([], [])],
    ids=["the tightest row is taken", "a long sequence has its own", "nothing"],
)
def test_rows_of_ten_tokens_by_hand(lengths, rows):
    assert pack(lengths, capacity=10) == rows


@given(lengths=LENGTHS, ranks=st.integers(1, 6))
def test_shares_hold_everything_once_and_differ_by_one_item_at_most(lengths, ranks):
    shares = balance(lengths, ranks)
    loads = [sum(lengths[i] for i in share) for share in shares]
    assert len(shares) == ranks
    assert sorted(i for share in shares for i in share) == list(range(len(lengths)))
    assert max(loads) - min(loads) <= max(lengths, default=0)


def test_ties_are_broken_by_order():
    assert balance([1, 1, 1, 1], 2) == [[0, 2], [1, 3]]


def test_capacity_and_ranks_must_be_positive():
    with pytest.raises(InputError, match="capacity must be at least 1 token, found 0"):
        pack([1], 0)
    with pytest.raises(InputError, match="ranks must be at least 1, found 0"):
        balance([1], 0)

"""The work plan of the ranks: nothing lost, equal counts, bounds kept, the same every time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import InputError
from learner.batch.microbatch_plan import plan_microbatches, slowest, workload, workloads

LENGTHS = st.lists(st.integers(1, 60), max_size=40)
RANKS = st.integers(1, 6)
CAPACITY = st.integers(1, 80)


@given(lengths=LENGTHS, ranks=RANKS, capacity=CAPACITY)
def test_every_sequence_is_in_one_row_of_one_rank(lengths, ranks, capacity):
    plan = plan_microbatches(lengths, ranks, capacity)
    assert sorted(i for rows in plan for row in rows for i in row) == list(range(len(lengths)))
    assert plan == plan_microbatches(lengths, ranks, capacity)


@given(lengths=LENGTHS, ranks=RANKS, capacity=CAPACITY)
def test_every_rank_has_the_same_number_of_rows_and_at_least_one(lengths, ranks, capacity):
    counts = {len(rows) for rows in plan_microbatches(lengths, ranks, capacity)}
    assert len(counts) == 1
    assert counts.pop() >= 1


@given(lengths=LENGTHS, ranks=RANKS, capacity=CAPACITY)
def test_a_row_is_within_the_capacity_or_holds_one_long_sequence(lengths, ranks, capacity):
    for rows in plan_microbatches(lengths, ranks, capacity):
        assert all(len(row) <= 1 or sum(lengths[i] for i in row) <= capacity for row in rows)


@given(lengths=LENGTHS, ranks=RANKS, capacity=CAPACITY)
def test_a_dummy_row_is_only_where_every_sequence_of_the_rank_is_alone(lengths, ranks, capacity):
    for rows in plan_microbatches(lengths, ranks, capacity):
        assert all(rows) or all(len(row) <= 1 for row in rows)


@given(lengths=st.lists(st.integers(1, 30_000), min_size=1, max_size=40), ranks=RANKS)
def test_the_busiest_rank_has_at_most_the_mean_and_one_sequence(lengths, ranks):
    loads = workloads(lengths, plan_microbatches(lengths, ranks, 4096))
    assert sum(loads) == sum(workload(length) for length in lengths)
    assert max(loads) <= sum(loads) / ranks + workload(max(lengths))


@given(lengths=LENGTHS, ranks=RANKS, capacity=CAPACITY)
def test_the_rows_of_every_rank_descend_by_workload(lengths, ranks, capacity):
    for rows in plan_microbatches(lengths, ranks, capacity):
        loads = [sum(workload(lengths[i]) for i in row) for row in rows]
        assert loads == sorted(loads, reverse=True)


@given(lengths=LENGTHS, ranks=RANKS, capacity=CAPACITY, seed=st.randoms())
def test_where_ranks_meet_at_every_row_no_order_waits_less_than_the_plan(
    lengths, ranks, capacity, seed
):
    plan = plan_microbatches(lengths, ranks, capacity)
    waiting = slowest(lengths, plan, at_microbatches=True)
    assert slowest(lengths, plan, at_microbatches=False) <= waiting
    shuffled = [seed.sample(rows, len(rows)) for rows in plan]
    assert waiting <= slowest(lengths, shuffled, at_microbatches=True)


def test_long_sequences_weigh_more_than_their_tokens():
    lengths = [8000, *[1000] * 16]
    [one, other] = plan_microbatches(lengths, 2, 8000)
    shared = [sum(lengths[i] for row in rows for i in row) for rows in (one, other)]
    assert shared == [8000, 16000], "equal tokens would be unequal work"


def test_the_largest_row_is_cut_where_a_rank_has_too_few():
    lengths = [7, 5, 3, 3, 3, 3]
    assert plan_microbatches(lengths, 2, 11) == [[[0, 3], [5]], [[2, 4], [1]]]


def test_a_rank_without_a_sequence_has_a_dummy_row():
    assert plan_microbatches([5], 3, 8) == [[[0]], [[]], [[]]]
    assert plan_microbatches([3, 3, 3], 2, 3) == [[[0], [2]], [[1], []]]


def test_capacity_and_ranks_must_be_positive():
    with pytest.raises(InputError, match="capacity must be at least 1 token, found 0"):
        plan_microbatches([1], 1, 0)
    with pytest.raises(InputError, match="ranks must be at least 1, found 0"):
        plan_microbatches([1], 0, 8)

"""The work plan of the ranks: nothing lost, equal counts, bounds kept, the same every time."""

from hypothesis import given
from hypothesis import strategies as st

from learner.batch.microbatch_plan import plan_microbatches, slowest, workload, workloads

LENGTHS = st.lists(st.integers(1, 60), max_size=40)
RANKS = st.integers(1, 6)
CAPACITY = st.integers(1, 80)


@given(lengths=LENGTHS, ranks=RANKS, capacity=CAPACITY)
def test_a_plan_has_every_sequence_once_and_as_many_rows_for_each_rank_as_it_needs(
    lengths, ranks, capacity
):
    plan = plan_microbatches(lengths, ranks, capacity)
    assert plan == plan_microbatches(lengths, ranks, capacity)
    assert sorted(i for rows in plan for row in rows for i in row) == list(range(len(lengths)))
    assert len({len(rows) for rows in plan}) == 1
    for rows in plan:
        assert rows
        assert all(len(row) <= 1 or sum(lengths[i] for i in row) <= capacity for row in rows)
        assert all(rows) or all(len(row) <= 1 for row in rows), "a dummy beside a row to cut"
        loads = [sum(workload(lengths[i]) for i in row) for row in rows]
        assert loads == sorted(loads, reverse=True)


@given(lengths=st.lists(st.integers(1, 30_000), min_size=1, max_size=40), ranks=RANKS)
def test_the_busiest_rank_has_at_most_the_mean_and_one_sequence(lengths, ranks):
    loads = workloads(lengths, plan_microbatches(lengths, ranks, 4096))
    assert sum(loads) == sum(workload(length) for length in lengths)
    assert max(loads) <= sum(loads) / ranks + workload(max(lengths))


@given(lengths=LENGTHS, ranks=RANKS, capacity=CAPACITY, seed=st.randoms())
def test_where_ranks_meet_at_every_row_no_order_waits_less_than_the_plan(
    lengths, ranks, capacity, seed
):
    plan = plan_microbatches(lengths, ranks, capacity)
    waiting = slowest(lengths, plan, at_microbatches=True)
    assert slowest(lengths, plan, at_microbatches=False) <= waiting
    shuffled = [seed.sample(rows, len(rows)) for rows in plan]
    assert waiting <= slowest(lengths, shuffled, at_microbatches=True)


@given(lengths=LENGTHS, ranks=RANKS, capacity=CAPACITY, owners=st.integers(1, 9))
def test_sequences_of_one_owner_lie_on_one_rank(lengths, ranks, capacity, owners):
    owner = [i * i % owners for i in range(len(lengths))]
    plan = plan_microbatches(lengths, ranks, capacity, owner)
    assert sorted(i for rows in plan for row in rows for i in row) == list(range(len(lengths)))
    of_ranks = [{owner[i] for row in rows for i in row} for rows in plan]
    assert sum(map(len, of_ranks)) == len(set(owner))
    assert len({len(rows) for rows in plan}) == 1


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

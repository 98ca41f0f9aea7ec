"""The rules of admission against brute force; `simulated_run` checks them in whole runs."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import InputError
from queues.policy.admission import Bounds, Choice, choose_batch, feasible, leases_allowed
from tests.queues.simulated_run import Run, make_state

DUE = st.dictionaries(st.integers(0, 12), st.integers(1, 6), max_size=5)
BOUNDS = st.builds(
    lambda staleness, size, steps, more, policy: Bounds(
        max_staleness=staleness,
        groups_per_batch=size,
        steps=steps,
        most_live=None if more is None else size + more,
        on_overdue=policy,
    ),
    st.integers(0, 4),
    st.integers(1, 5),
    st.integers(1, 12),
    st.none() | st.integers(0, 6),
    st.sampled_from(["wait", "wait", "drop", "mask", "train"]),
)


def feasible_by_definition(due, version, size):
    """Return True if a state is feasible as `queues.policy.admission` defines it, date by date."""
    return all(
        sum(count for date, count in due.items() if date <= d) <= (d - version + 1) * size
        for d in range(version - 1, version + 30)
    )


@given(DUE, st.integers(0, 8), st.integers(1, 5))
def test_feasible_is_its_definition(due, version, size):
    # Overdue groups of every age show at d = v − 1, where no place is left.
    expected = feasible_by_definition(due, version, size)
    assert feasible(due, version=version, groups_per_batch=size) == expected


@given(
    st.dictionaries(st.integers(-1, 6), st.integers(1, 5), max_size=4),
    st.integers(0, 11), st.integers(-4, 1), BOUNDS, st.integers(0, 3),
)  # fmt: skip
def test_as_many_leases_are_allowed_as_can_be_granted_one_by_one(
    due_from_now, version, behind, bounds, overdue
):
    due = {version + date: count for date, count in due_from_now.items()}
    start = version + behind

    def may_lease(state):
        state = state + Counter([start + bounds.max_staleness])
        most = min(bounds.max_staleness + 1, bounds.steps - version) * bounds.groups_per_batch
        most = most if bounds.most_live is None else min(most, bounds.most_live)
        fits = feasible_by_definition(dict(state), version, bounds.groups_per_batch)
        return fits and sum(state.values()) + overdue <= most

    granted, state = 0, Counter(due)
    while may_lease(state):
        state[start + bounds.max_staleness] += 1
        granted += 1
    allowed = leases_allowed(
        due, version=version, start_version=start, bounds=bounds, overdue=overdue
    )
    assert allowed == granted


@given(
    st.lists(st.integers(0, 10), max_size=12).map(sorted), DUE, st.integers(0, 8), BOUNDS,
    st.booleans(),
)  # fmt: skip
def test_a_batch_is_chosen_exactly_if_the_policy_allows_what_is_left_at_the_next_version(
    ready, leased, version, bounds, ended
):
    size = bounds.groups_per_batch
    choice = choose_batch(ready, leased, version=version, bounds=bounds, ended=ended)
    rest = dict(Counter(leased) + Counter(ready[size:]))
    enough = len(ready) >= size or ended
    lifted = bounds.on_overdue != "wait"
    if enough and (lifted or feasible_by_definition(rest, version + 1, size)):
        assert choice == Choice(min(size, len(ready)))
    else:
        assert choice.count == 0
    if choice.waits_until_due is not None:
        by_then = sum(n for date, n in rest.items() if date <= choice.waits_until_due)
        assert by_then > max(0, choice.waits_until_due - version) * size


def test_nothing_is_leased_that_the_remaining_steps_cannot_train():
    bounds = Bounds(max_staleness=4, groups_per_batch=4, steps=10)
    assert [bounds.window(version) for version in (0, 5, 6, 9, 10, 11)] == [20, 20, 16, 4, 0, 0]
    assert leases_allowed({12: 3}, version=9, start_version=9, bounds=bounds) == 1


def test_a_window_smaller_than_the_bound_allows_is_kept_and_one_below_a_batch_is_refused():
    bounds = Bounds(max_staleness=2, groups_per_batch=4, steps=10, most_live=9)
    assert [bounds.window(version) for version in (0, 7, 8, 9)] == [9, 9, 8, 4]
    assert leases_allowed({1: 6}, version=0, start_version=0, bounds=bounds) == 3
    with pytest.raises(InputError, match="window = 3 must be at least groups_per_batch = 4"):
        Bounds(max_staleness=2, groups_per_batch=4, steps=10, most_live=3)


def test_a_narrower_window_of_staleness_gives_earlier_deadlines_and_fewer_places():
    bounds = Bounds(max_staleness=3, groups_per_batch=4, steps=10)
    narrowed = [bounds.within(staleness) for staleness in (0, 1, 3, 9)]
    assert [(x.deadline(5), x.window(5)) for x in narrowed] == [(5, 4), (6, 8), (8, 16), (8, 16)]


@pytest.mark.parametrize(
    ("name", "value"), [("max_staleness", -1), ("groups_per_batch", 0), ("steps", 0)]
)
def test_bounds_that_would_deadlock_are_refused(name, value):
    numbers = {"max_staleness": 1, "groups_per_batch": 1, "steps": 1, name: value}
    with pytest.raises(InputError, match=f"{name} = {value} must be at least"):
        Bounds(**numbers)


def test_more_staleness_is_used_when_engines_outrun_the_learner():
    largest = []
    for max_staleness in range(5):
        run = Run(make_state(max_staleness, 4, 30, 1), seed=1, tie_rate=0.0)
        run.free, run.delay = {"engine-0": 100}, {"engine-0": 0.01}
        run.run()
        largest.append(max(run.lags))
    assert largest == [0, 1, 2, 3, 4]

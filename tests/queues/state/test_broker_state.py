"""The state under random play: one state per group, always feasible, lines in their order."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from queues.config import QueuesConfig, RunSpec
from queues.errors import QueueClosed
from queues.policy.admission import OnOverdue, choose_batch, feasible
from queues.policy.dynamic_sampling import TieFilter
from queues.records import BatchRecord, Purpose, Summary
from queues.state.broker_state import BrokerState
from queues.state.evaluation_run import EvaluationRun
from queues.state.groups import Group, State
from queues.state.prompt_queue import PromptQueue
from queues.state.results_queue import ResultsQueue
from tests.queues.conftest import make_prompts


def make_state(
    tie_filter: TieFilter | None = None,
    max_attempts: int = 2,
    retry_seconds: float = 0.0,
    policy: OnOverdue = "wait",
    max_staleness: int = 1,
    groups_per_batch: int = 2,
    steps: int = 5,
) -> BrokerState:
    state = BrokerState(
        config=QueuesConfig(
            max_staleness=max_staleness, on_overdue=policy, max_attempts=max_attempts,
            retry_seconds=retry_seconds, patience_seconds=0.0,
        ),
        spec=RunSpec(groups_per_batch=groups_per_batch, group_size=2, steps=steps),
    )  # fmt: skip
    state.tie_filter = tie_filter
    return state


def make_group(number: int, evaluation: str | None = None) -> Group:
    return Group(
        number=number, group_id=f"g{number}", prompt=make_prompts(1)[0], evaluation=evaluation
    )


def result(group: Group, *, tied: bool = False) -> Summary:
    return Summary(
        group_id=group.group_id, prompt_id=group.prompt.prompt_id, attempt=group.attempt,
        rollouts=2 if group.evaluation is None else 1, tokens=4, reward=0.5,
        task_rewards=(1, 1) if tied else (0, 1),
        oldest_version=group.start_version, newest_version=group.start_version,
    )  # fmt: skip


def check(state: BrokerState, issued: int) -> None:
    """Every invariant, recounted from the groups themselves."""
    groups = list(state.groups.in_flight.values())
    live = [group for group in groups if group.due is not None]
    train = sum(n for (purpose, _, _), n in state.groups.counts.items() if purpose == "train")
    assert train == issued
    for where in (State.QUEUED, State.LEASED, State.READY, State.TAKEN):
        expected = [x for x in groups if x.state is where and x.purpose is Purpose.TRAIN]
        assert state.groups.train(where) == len(expected)
    assert state.groups.live == len(live)
    assert len(live) <= state.bounds.window(state.version)
    assert len(state.prompts) == state.groups.train(State.QUEUED)
    assert len(state.results) == state.groups.train(State.READY)
    assert state.groups.overdue == sum(x.overdue and x.state is not State.TAKEN for x in live)
    assert state.bounds.on_overdue != "wait" or feasible(
        state.groups.due, version=state.version, groups_per_batch=state.bounds.groups_per_batch
    )
    leased = Counter(x.due for x in live if x.state is State.LEASED)
    assert state.groups.leased_due == leased
    ended = state.ended
    for state.ended in (True, ended):
        assert state.choose_batch() == choose_batch(
            state.results.deadlines(),
            leased,
            version=state.version,
            bounds=state.bounds,
            ended=state.ended and not state.prompts and not leased,
        )


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=150),
    st.integers(0, 3), st.integers(1, 4), st.integers(1, 6), st.none() | st.integers(1, 5),
    st.sampled_from(["wait", "drop", "mask", "train"]),
)  # fmt: skip
def test_every_group_is_in_one_state_whatever_happens(
    moves: list[tuple[int, int]],
    max_staleness: int,
    groups_per_batch: int,
    steps: int,
    limit: int | None,
    policy: OnOverdue,
) -> None:
    state = make_state(
        policy=policy,
        tie_filter=None if limit is None else TieFilter(limit=limit),
        max_staleness=max_staleness,
        groups_per_batch=groups_per_batch,
        steps=steps,
    )
    state.evaluate(
        EvaluationRun(name="e", count=3, temperature=0.0, min_version=1), make_prompts(3)
    )
    issued, lags = 0, []
    for move, number in moves:
        leased = state.groups.leased()
        if move == 0 and not state.training_over and (wanted := state.wanted()) is not None:
            issued += len(state.issue(make_prompts(wanted)))
        elif move == 1:
            engine = f"engine-{number % 2}"
            if number < 2:
                state.serving(engine, max(state.version, state.engines.get(engine, 0)))
            if not state.over:
                leases = state.lease(engine, 5, now=0.0, expires=0.0)
                assert sum(lease.group_size for lease in leases) <= 5
        elif move == 2 and leased:
            group = leased[number % len(leased)]
            tied = number == 0 and group.evaluation is None
            accepted = state.accept(group, result(group, tied=tied), now=0.0)
            assert accepted.state is group.state
            assert (group.state is State.DROPPED) <= (tied and limit is not None)
        elif move == 3 and leased:
            state.give_back(leased[number % len(leased)], "unlucky", now=0.0)
        elif move == 4 and not state.training_over and not state.taken:
            state.take(state.version)
            issued += len(state.pass_over())
            lags += [state.version - group.start_version for group in state.taken]
        elif move == 5 and state.taken:
            record = BatchRecord(version=state.version, acked_at=0.0, statistics={})
            state.ack(record, now=0.0)
        check(state, issued)
    late = sum(lag > max_staleness for lag in lags)
    assert late == state.late
    assert policy in ("mask", "train") or not late


def test_the_line_serves_evaluations_first_and_redelivered_groups_before_new_ones() -> None:
    line = PromptQueue()
    line.open_evaluation("early", min_version=1)
    line.open_evaluation("late", min_version=5)
    for group in (make_group(1), make_group(2), make_group(3, "late"), make_group(4, "early")):
        line.append(group)
    again = make_group(5)
    line.redeliver(again)
    assert len(line) == 3
    assert line.pop_evaluations(9, engine_version=0) == []
    assert [group.number for group in line.pop_evaluations(9, engine_version=4)] == [4]
    assert [group.number for group in line.pop_train(2)] == [5, 1]
    assert [group.number for group in line.pop_evaluations(9, engine_version=5)] == [3]
    assert [group.number for group in line.pop_train(9)] == [2]


def test_results_leave_by_deadline_and_then_in_the_order_of_issue_whoever_came_first() -> None:
    results = ResultsQueue()
    assert results.oldest_since() is None
    for number, due in reversed([*enumerate([4, 3, 4, 2, 3])]):
        group = make_group(number)
        group.due, group.ready_at = due, 10.0 + number
        results.add(group)
    assert results.deadlines() == [2, 3, 3, 4, 4]
    assert results.oldest_since() == 10.0
    assert [group.number for group in results.pop(4)] == [3, 1, 4, 0]
    assert [group.number for group in results.pop(4)] == [2]


@pytest.mark.parametrize("reason", ["engine_lost", "reward_model_lost"])
def test_what_a_group_cannot_help_is_not_held_against_it(reason: str) -> None:
    state = make_state()
    (group,) = state.issue(make_prompts(1))
    state.serving("a", 0)
    for _ in range(5):
        state.lease("a", 2, now=0.0, expires=0.0)
        assert state.give_back(group, reason, now=0.0) is State.QUEUED
    for expected in (State.QUEUED, State.FAILED):
        state.lease("a", 2, now=0.0, expires=0.0)
        assert state.give_back(group, "reward", now=0.0) is expected


def leased(state: BrokerState, now: float, capacity: int = 2) -> list[int]:
    """Return indices of the prompts that are leased now."""
    leases = state.lease("a", capacity, now=now, expires=0.0)
    return [int(lease.prompt.prompt_id.rpartition("/")[2]) for lease in leases]


def test_a_failed_group_waits_twice_as_long_after_every_failure_and_then_is_first_in_line() -> None:
    state = make_state(max_attempts=9, retry_seconds=1.0, max_staleness=4, groups_per_batch=4)
    first, *_ = state.issue(make_prompts(9))
    state.serving("a", 0)
    now, others = 100.0, iter(range(1, 9))
    for wait in (1, 2, 4, 8, 16, 32, 32, 32):
        assert leased(state, now) == [0]
        assert state.give_back(first, "reward", now=now) is State.QUEUED
        assert leased(state, now + wait - 0.01) == [next(others)], "others are leased meanwhile"
        now += wait
    assert leased(state, now) == [0]
    assert state.give_back(first, "reward", now=now) is State.FAILED


def test_groups_that_are_set_back_are_replaced_in_the_line_and_never_exceed_the_last_step() -> None:
    state = make_state(max_attempts=2, retry_seconds=1.0, steps=3)
    groups = state.issue(make_prompts(4))
    state.serving("a", 0)
    assert leased(state, 0.0, capacity=8) == [0, 1, 2, 3]
    for group in groups:
        state.give_back(group, "reward", now=0.0)
    assert (len(state.prompts), state.prompts.available) == (4, 0)
    assert state.wanted() == 2, "6 groups are all that 3 steps can train"
    state.issue(make_prompts(2, 4))
    assert leased(state, 0.5, capacity=4) == [4, 5]
    assert leased(state, 1.0, capacity=4) == [0, 1]
    assert state.groups.train(State.QUEUED) == len(state.prompts) == 2


def test_a_lost_engine_costs_its_groups_no_wait() -> None:
    state = make_state(retry_seconds=1.0)
    (group,) = state.issue(make_prompts(1))
    state.serving("a", 0)
    for _ in range(3):
        assert leased(state, 0.0) == [0]
        state.give_back(group, "engine_lost", now=0.0)


def test_evaluations_cost_no_wait_and_none_is_forgotten_when_its_version_cannot_come() -> None:
    state = make_state(max_attempts=3, retry_seconds=1.0, steps=1)
    run = EvaluationRun(name="e", count=2, temperature=0.0, min_version=1)
    first, second = state.evaluate(run, make_prompts(2))
    state.serving("a", 1)
    assert leased(state, 0.0) == [0, 1]
    state.give_back(first, "reward", now=0.0)
    assert leased(state, 0.0) == [0], "while the engine serves the version of the others"
    state.give_back(first, "reward", now=1.0)
    state.give_back(second, "engine_lost", now=1.0)
    assert state.prompts.pop_unreachable(1) == []
    assert state.prompts.pop_unreachable(0) == [second, first]
    state.prompts.advance(9.0)
    assert state.prompts.pop_evaluations(9, 9) == []


def test_a_finite_source_whose_groups_all_fail_ends_the_run() -> None:
    state = make_state()
    (group,) = state.issue(make_prompts(1))
    state.ended = True
    state.serving("a", 0)
    for _ in range(2):
        state.lease("a", 2, now=0.0, expires=0.0)
        state.give_back(group, "lost", now=0.0)
    assert state.over
    with pytest.raises(QueueClosed):
        state.take(0)

"""Queues in their order, and what failures cost a group; `simulated_run` plays at random."""

import time

import pytest

from queues.broker.status import status_of
from queues.config import QueuesConfig, RunSpec
from queues.errors import QueueClosed
from queues.state.broker_state import BrokerState
from queues.state.groups import EvaluationRun, Group, State
from queues.state.prompt_queue import PromptQueue
from tests.queues.conftest import make_prompts


def make_state(*, max_attempts=2, retry_seconds=0.0, max_staleness=1, groups_per_batch=2, steps=5):
    return BrokerState(
        config=QueuesConfig(
            max_staleness=max_staleness, max_attempts=max_attempts, retry_seconds=retry_seconds,
            patience_seconds=0.0,
        ),
        spec=RunSpec(groups_per_batch=groups_per_batch, group_size=2, steps=steps),
    )  # fmt: skip


def make_group(number, evaluation=None):
    return Group(
        number=number, group_id=f"g{number}", prompt=make_prompts(1)[0], evaluation=evaluation
    )


def test_the_line_serves_evaluations_first_and_redelivered_groups_before_new_ones():
    sizes = {"count": 1, "temperature": 0.0}
    versions = {"early": 1, "late": 5}
    line = PromptQueue(
        {x: EvaluationRun(name=x, min_version=version, **sizes) for x, version in versions.items()}
    )
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


def test_results_leave_by_deadline_and_then_in_the_order_of_issue_whoever_came_first():
    state = make_state()
    for number, due in reversed([*enumerate([4, 3, 4, 2, 3])]):
        group = make_group(number)
        group.due, group.ready_at = due, time.monotonic() - number
        state.add_result(group)
    assert [(group.due, group.number) for group in state.results] == [
        (2, 3), (3, 1), (3, 4), (4, 0), (4, 2),
    ]  # fmt: skip
    assert 4.0 <= status_of(state, -1, paused=None).oldest_ready_seconds < 60.0


@pytest.mark.parametrize("reason", ["engine_lost", "infrastructure", "reward_model_lost"])
def test_what_a_group_cannot_help_costs_it_no_wait_and_is_not_held_against_it(reason):
    state = make_state(retry_seconds=1.0)
    (group,) = state.issue(make_prompts(1))
    state.serving("a", 0)
    for _ in range(5):
        assert leased(state, 0.0) == [0]
        assert state.give_back(group, reason, now=0.0) is State.QUEUED
    for now, expected in ((0.0, State.QUEUED), (1.0, State.FAILED)):
        assert leased(state, now) == [0]
        assert state.give_back(group, "reward", now=now) is expected


def leased(state, now, capacity=2):
    """Return indices of the prompts that are leased now."""
    leases = state.lease("a", capacity, now=now, expires=0.0)
    return [int(lease.prompt.prompt_id.rpartition("/")[2]) for lease in leases]


def test_a_failed_group_waits_twice_as_long_after_every_failure_and_then_is_first_in_line():
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


def test_groups_that_are_set_back_are_replaced_in_the_line_and_never_exceed_the_last_step():
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


def test_evaluations_cost_no_wait_and_none_is_forgotten_when_its_version_cannot_come():
    state = make_state(max_attempts=3, retry_seconds=1.0, steps=1)
    run = EvaluationRun(name="e", count=2, temperature=0.0, min_version=1)
    first, second = state.issue(make_prompts(2), run)
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


def test_a_finite_source_whose_groups_all_fail_ends_the_run():
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

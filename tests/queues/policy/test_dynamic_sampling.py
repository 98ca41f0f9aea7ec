"""Which groups hold no signal, and how many of them are dropped for one batch."""

import pytest

from queues.policy.dynamic_sampling import TieFilter, Verdict, tied
from queues.records import SHAPING
from queues.schema import encode, summarize
from tests.queues.conftest import make_group, make_rollout

DROPPED, KEPT, LET_THROUGH = Verdict.DROPPED, Verdict.KEPT, Verdict.LET_THROUGH


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.5], True),
        ([0.0, 0.0, 0.0], True),
        ([0.3, 0.1 + 0.2], True),
        ([0.0, 1e-9], True),
        ([0.0, 1e-7], False),
        ([1e9, 1e9 + 1], True),
        ([-1e9, -1e9 + 100], False),
        ([-1.0, 1.0], False),
        ([0.0, 0.0, 1.0], False),
    ],
)
def test_rewards_are_tied_up_to_rounding_relative_to_their_size(rewards, expected):
    assert tied(rewards) is expected
    assert tied(rewards[::-1]) is expected


def test_only_so_many_are_dropped_for_a_batch_and_the_next_batch_begins_anew():
    tie_filter = TieFilter(limit=2)
    verdicts = [tie_filter.judge(x) for x in ([0, 0], [0, 1], [1, 1], [1, 1], [0, 1], [0, 0])]
    assert verdicts == [DROPPED, KEPT, DROPPED, LET_THROUGH, KEPT, LET_THROUGH]
    assert (tie_filter.dropped, tie_filter.passed, tie_filter.let_through) == (2, 2, 2)
    tie_filter.next_batch()
    assert [tie_filter.judge([1, 1]) for _ in range(3)] == [DROPPED, DROPPED, LET_THROUGH]
    assert (tie_filter.passed, tie_filter.let_through) == (1, 3)


def test_shaping_by_length_hides_no_tie():
    shaped = {"exact": 1.0} | dict.fromkeys(SHAPING, -0.35)
    rollouts = [
        make_rollout(0, reward=1.0, reward_parts={"exact": 1.0}),
        make_rollout(1, reward=1.0 - 0.35 * len(SHAPING), reward_parts=shaped),
    ]
    assert [rollout.task_reward for rollout in rollouts] == pytest.approx([1.0, 1.0])
    summary = summarize(encode(make_group(rollouts=rollouts)))
    assert summary.task_rewards == pytest.approx((1.0, 1.0))
    assert tied(summary.task_rewards)
    assert summary.reward == pytest.approx(1.0 - 0.35 * len(SHAPING) / 2)

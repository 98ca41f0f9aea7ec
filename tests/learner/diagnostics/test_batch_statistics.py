"""Every figure of a batch is over the set that its text names: masked and failed ones present."""

import dataclasses
import math

import pytest
from rollouts import PlainEngine, group, rollout

from learner.config.learner import LearnerConfig
from learner.update import Updater
from queues.records import GOLD, FinishReason, TurnReward


def cut(one):
    return dataclasses.replace(one, finish_reason=FinishReason.LENGTH)


GROUPS = [
    group(
        "a",  # one whole, one cut off across an update, one without a score
        [
            rollout([1, 2, 3, 4], reward=1.0, versions=5, index=0),
            cut(rollout([1, 2, *range(3, 9)], reward=0.0, versions=[3, 3, 4, 4, 5, 5], index=1)),
            rollout([1, 2, 3, 4, 5], reward=math.nan, versions=5, index=2),
        ],
    ),
    group(
        "b",  # tied in the task's reward, not in the length penalty; one with an old beginning
        [
            rollout([1, 2, 3], reward=1.0, versions=5, index=0, reward_parts={"overlong": 0.0}),
            rollout(
                [1, 2, 3, 4, 5],
                reward=0.5,
                versions=[2, 5, 5],
                index=1,
                reward_parts={"overlong": -0.5},
            ),
        ],
    ),
    group("c", [cut(rollout([1, 2, 3], reward=0.0, versions=1, index=i)) for i in range(2)]),
]


@pytest.fixture(scope="module")
def report():
    config = LearnerConfig(mask_truncated=True, max_token_lag=2)
    return Updater(PlainEngine(), config).update(GROUPS, 5)


def test_lengths_are_those_of_all_rollouts(report):
    assert report.response_length_mean == pytest.approx((2 + 6 + 3 + 1 + 3 + 1 + 1) / 7)


def test_tokens_and_rollouts_trained_are_those_in_the_loss(report):
    assert report.tokens_trained == 2 + 1 + 2
    assert report.rollouts_trained == 3
    assert report.lag_histogram == {0: 5}
    assert (report.max_lag, report.lag_mean) == (0, 0.0)
    assert report.group_lag_histogram == {0: 2}
    assert sum(figures.tokens for figures in report.origins.values()) == 5


def test_groups_and_rollouts_are_counted_whether_they_train_or_not(report):
    assert (report.groups, report.tied_groups, report.unscored) == (3, 2, 1)
    assert (report.truncated_rollouts, report.dropped_rollouts) == (3, 1)
    assert report.multi_version_rollouts == 2
    assert report.tokens_too_old == 1 + 2
    assert report.reward_mean == pytest.approx(2.5 / 6)


def test_a_rollout_that_crossed_an_update_is_not_fresh_for_its_old_tokens_being_masked(report):
    """The engine kept the cache that the old weights wrote."""
    tokens = {name: figures.tokens for name, figures in report.origins.items()}
    assert tokens == {"fresh": 3, "crossed": 2, "stale": 0}


def test_rewards_of_turns_untie_a_group_whose_final_rewards_are_equal():
    def paid(reward, index):
        one = rollout([1, 2, 3, 4], reward=1.0 + reward, index=index)
        return dataclasses.replace(one, turn_rewards=[TurnReward(3, reward)])

    for advantage in ("rloo", "reinforce_pp"):
        config = LearnerConfig(process_rewards=True, advantage=advantage)
        groups = [
            group("a", [paid(0.0, 0), paid(0.5, 1)]),
            group("b", [paid(0.5, i) for i in (0, 1)]),
        ]
        assert Updater(PlainEngine(), config).update(groups, 0).tied_groups == 1


def test_a_gold_reward_is_reported_and_trains_nothing():
    def trained(*golds):
        parts = [{"a": 1.0, GOLD: gold} for gold in golds] or [{"a": 1.0}] * 2
        of_gold = [
            rollout([1, 2, 3, 4, 3, 4], reward=1.0, index=0, reward_parts=parts[0]),
            cut(rollout([1, 2, 5, 5], reward=0.0, index=1, reward_parts={**parts[1], "a": 0.0})),
        ]
        without = [
            rollout([1, 2, 3], reward=float(i), index=i, reward_parts={"a": float(i)})
            for i in (0, 1)
        ]
        config = LearnerConfig(advantage="gdpo")
        groups = [group("a", of_gold), group("b", without)]
        return Updater(PlainEngine(), config).update(groups, 0)

    report, other, plain = trained(0.0, 1.0), trained(1.0, 0.0), trained()
    assert report.gold.groups == [(0.5, 0.5)]
    assert (report.gold.length, report.gold.finished) == (3.0, 0.5)
    assert report.gold.distinct == 3 / 4, "3-4, 4-3, 3-4 and 5-5"
    assert report.loss == other.loss == plain.loss
    assert report.grad_norm == other.grad_norm == plain.grad_norm > 0
    assert plain.gold is None

"""From rollout groups to micro-batches."""

import dataclasses

import pytest
import torch
from rollouts import group, random_groups, rollout

from headway.errors import HeadwayError
from learner.batch.batch import read_batch, split_groups
from learner.batch.microbatch_plan import plan_microbatches
from learner.config.learner import LearnerConfig
from learner.objective.objective import Objective
from queues.records import FinishReason, TurnReward


def batch_of(groups, **settings):
    """Return a batch with its advantages."""
    config = LearnerConfig(**settings)
    return Objective(config).with_advantages(
        read_batch(
            groups, mask_truncated=config.mask_truncated, process_rewards=config.process_rewards
        )
    )


def part(batch, groups, aggregation="token_mean", fixed_length=None):
    return batch.minibatch(groups, aggregation=aggregation, fixed_length=fixed_length)


def built(groups, **settings):
    """All of a batch as one minibatch."""
    return part(batch_of(groups, **settings), range(len(groups)))


TWO_GROUPS = [
    group(
        "a",
        [
            rollout([3, 4, 5], reward=1.0, versions=7, logprobs=-0.5),
            rollout([3, 4, 6, 1], reward=0.0, versions=[7, 8], logprobs=[-1.0, -2.0]),
        ],
    ),
    group("b", [rollout([9, 2, 2], prompt=1, reward=2.0, mask=[False, True, False])]),
]


def test_a_batch_lines_up_token_by_token():
    tokens = built(TWO_GROUPS).tokens
    assert tokens.token_ids.tolist() == [3, 4, 5, 3, 4, 6, 1, 9, 2, 2]
    assert tokens.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 1, 2]
    assert tokens.sequence_ids.tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2]
    assert tokens.group_ids.tolist() == [0] * 7 + [1] * 3
    assert tokens.mask.int().tolist() == [0, 0, 1, 0, 0, 1, 1, 0, 1, 0]
    assert tokens.versions.tolist() == [-1, -1, 7, -1, -1, 7, 8, -1, 0, -1]
    assert tokens.behavior_logprobs.tolist() == [0, 0, -0.5, 0, 0, -1, -2, 0, -1, 0]
    half = 0.5**0.5
    torch.testing.assert_close(
        tokens.advantages, torch.tensor([half] * 3 + [-half] * 4 + [0.0] * 3), atol=1e-5, rtol=0
    )
    torch.testing.assert_close(tokens.token_weights, tokens.mask / 4)


def test_dtypes_are_as_the_engine_expects_them():
    tokens = built(TWO_GROUPS).tokens
    for name in ("token_ids", "position_ids", "sequence_ids", "group_ids", "versions"):
        assert getattr(tokens, name).dtype == torch.int64
    for name in ("behavior_logprobs", "advantages", "token_weights"):
        assert getattr(tokens, name).dtype == torch.float32
    assert tokens.mask.dtype == torch.bool


@pytest.mark.parametrize("capacity", [1, 9, 20, 10_000])
def test_rows_hold_whole_sequences_each_once(capacity):
    batch = batch_of(random_groups())
    [plan] = plan_microbatches(batch.lengths, 1, capacity)
    rows = batch.microbatches(plan, torch.device("cpu"))
    seen = torch.cat([row.sequence_ids for row in rows])
    assert torch.bincount(seen).tolist() == batch.lengths
    for row in rows:
        assert len(row.token_ids) <= capacity or len(torch.unique(row.sequence_ids)) == 1
        for sequence in torch.unique(row.sequence_ids).tolist():
            here = row.take((row.sequence_ids == sequence).nonzero().flatten())
            there = batch.tokens.take((batch.tokens.sequence_ids == sequence).nonzero().flatten())
            for name in here.__dataclass_fields__:
                one, other = getattr(here, name), getattr(there, name)
                assert one is other is None or torch.equal(one, other), name
        assert row.position_ids[0] == 0


def test_a_rollout_without_a_score_is_left_out_of_every_count():
    groups = [group("a", [rollout([1, 2, 3], reward=float("nan")), rollout([1, 2, 3], reward=1.0)])]
    batch = built(groups)
    assert batch.lengths == [3]
    assert batch.tokens.sequence_ids.tolist() == [1] * 3
    assert batch.tokens.token_weights.tolist() == [0.0, 0.0, 1.0]


def test_a_rollout_must_begin_with_a_token_that_was_not_sampled():
    groups = [group("a", [rollout([1, 2], prompt=0, index=3)])]
    with pytest.raises(HeadwayError, match="group a, sample 3: a path must begin"):
        built(groups)


def test_an_empty_batch_is_refused():
    with pytest.raises(HeadwayError, match="without rollouts"):
        built([])


def test_a_dummy_row_trains_nothing():
    [row] = built(TWO_GROUPS).microbatches([[]], torch.device("cpu"))
    assert row.token_ids.tolist() == [3, 4]
    assert row.position_ids.tolist() == [0, 1]
    assert not row.mask.any()
    assert row.token_weights.tolist() == [0, 0]


def test_a_minibatch_is_whole_groups_with_weights_of_its_own():
    batch = batch_of(TWO_GROUPS)
    first, second = part(batch, [0]), part(batch, [1])
    assert first.tokens.token_ids.tolist() == [3, 4, 5, 3, 4, 6, 1]
    assert first.tokens.sequence_ids.tolist() == [0] * 3 + [1] * 4
    torch.testing.assert_close(first.tokens.token_weights, first.tokens.mask / 3)
    torch.testing.assert_close(first.tokens.advantages, batch.tokens.advantages[:7])
    assert first.lengths == [3, 4]
    assert second.tokens.sequence_ids.tolist() == [2] * 3
    assert second.tokens.token_weights.tolist() == [0, 1, 0]
    assert second.lengths == [3]
    assert part(batch, [1, 0]).tokens.token_weights.tolist() == (
        part(batch, [0, 1]).tokens.token_weights.tolist()
    )


TIED = group("c", [rollout([5, 6, 7], reward=1.0), rollout([5, 6, 8], reward=1.0)])


def test_tied_groups_are_dropped_from_rows_and_denominators():
    batch = batch_of([*TWO_GROUPS, TIED], drop_tied=True)
    whole = part(batch, [0, 1, 2], "fixed_length", 10)
    assert whole.lengths == [3, 4]
    assert whole.tokens.token_weights[whole.tokens.mask].tolist() == pytest.approx([1 / 20] * 3)
    alone = part(batch, [2])
    assert alone.lengths == [3, 3]
    assert alone.trainable == []
    assert not alone.tokens.token_weights.any()
    assert not part(batch_of([TIED]), [0]).tokens.advantages.any()


def test_truncated_rollouts_are_masked_but_stay_in_baselines_and_in_the_count_of_rollouts():
    [first, second] = TWO_GROUPS[0].rollouts
    cut = dataclasses.replace(second, finish_reason=FinishReason.LENGTH)
    batch = batch_of([group("a", [first, cut])], mask_truncated=True)
    tokens = part(batch, [0], "fixed_length", 10).tokens
    assert tokens.mask.int().tolist() == [0, 0, 1, 0, 0, 0, 0]
    assert tokens.advantages[2].item() == pytest.approx(0.5**0.5, abs=1e-5)
    assert tokens.token_weights[2].item() == pytest.approx(1 / 20)
    assert part(batch, [0]).tokens.token_weights[2].item() == 1.0


def test_rewards_of_masked_rollouts_and_of_their_turns_stay_in_the_baselines():
    def with_turn(tokens, reward, turn, **changes):
        turns = [TurnReward(2, turn)]
        return dataclasses.replace(rollout(tokens, reward=reward), turn_rewards=turns, **changes)

    first = with_turn([1, 2, 3, 4], 1.5, 0.5)
    cut = with_turn([1, 2, 3, 4, 5], 3.0, 2.0, sample_index=1, finish_reason=FinishReason.LENGTH)
    both = [group("a", [first, cut])]
    for settings in ({"advantage": "dr_grpo"}, {"advantage": "reinforce_pp_baseline"}):
        plain = batch_of(both, process_rewards=True, **settings)
        masked = batch_of(both, process_rewards=True, mask_truncated=True, **settings)
        assert masked.tokens.mask.int().tolist() == [0, 0, 1, 1, 0, 0, 0, 0, 0]
        assert torch.equal(masked.tokens.advantages[:4], plain.tokens.advantages[:4])
    assert (
        batch_of(both, process_rewards=True, mask_truncated=True, advantage="dr_grpo")
        .tokens.advantages[2]
        .item()
        == -0.75
    )


def shaped(reward, index, *, turn=0.0):
    """Return a rollout with a length penalty, which is not part of the task's reward."""
    one = rollout([1, 2, 3, 4], reward=reward - 0.8, index=index, reward_parts={"overlong": -0.8})
    return dataclasses.replace(one, turn_rewards=[TurnReward(2, turn)])


@pytest.mark.parametrize(
    ("name", "options", "expected"), [("maxrl", {}, 1.0), ("pass_at_k", {"k": 1}, 1.0)]
)
def test_counts_of_successes_take_the_reward_of_the_task_and_of_its_turns(name, options, expected):
    right, wrong = shaped(1.0, 0, turn=0.75), shaped(0.0, 1)
    settings = {"advantage": name, "advantage_options": options, "process_rewards": True}
    tokens = batch_of([group("a", [right, wrong])], **settings).tokens
    assert tokens.advantages[[2, 6]].tolist() == pytest.approx([expected, -expected], abs=1e-5)
    assert tokens.rewards[[2, 6]].tolist() == pytest.approx([1.0, 0.0])


def test_rewards_of_turns_go_to_the_turns_they_are_of():
    one = dataclasses.replace(
        rollout([1, 2, 3, 4, 5], reward=3.0),
        turn_rewards=[TurnReward(2, 0.5), TurnReward(4, 0.25)],
    )
    batch = read_batch([group("a", [one])], process_rewards=True)
    assert batch.process_rewards.tolist() == [0, 0, 0.5, 0, 0.25]
    assert batch.rewards.tolist() == [2.25]
    assert read_batch([group("a", [one])]).rewards.tolist() == [3.0]


def test_parts_of_rewards_and_greedy_baselines_are_columns():
    def scored(parts, baseline=None):
        one = rollout([1, 2, 3])
        return dataclasses.replace(one, reward_parts=parts, baseline_reward=baseline)

    both = [scored({"x": 1.0, "y": 2.0}, 0.5), scored({"x": 3.0})]
    batch = read_batch([group("a", both)])
    assert batch.reward_parts["x"].tolist() == [1.0, 3.0]
    assert batch.reward_parts["y"].isnan().tolist() == [False, True]
    assert batch.baseline_rewards is None
    assert read_batch([group("a", both[:1])]).baseline_rewards.tolist() == [0.5]


@pytest.mark.parametrize(("groups", "minibatches"), [(5, 2), (4, 4), (3, 5), (1, 1)])
def test_minibatches_hold_every_group_once_an_epoch_in_an_order_that_is_the_same_again(
    groups, minibatches
):
    parts = split_groups(groups, minibatches, version=3, epoch=1)
    assert parts == split_groups(groups, minibatches, version=3, epoch=1)
    assert sorted(i for part in parts for i in part) == list(range(groups))
    sizes = [len(part) for part in parts]
    assert len(parts) == min(groups, minibatches)
    assert max(sizes) - min(sizes) <= 1


def test_the_order_differs_between_epochs_and_versions():
    orders = {
        str(split_groups(12, 3, version=v, epoch=e)) for v, e in [(0, 0), (0, 1), (1, 0), (1, 1)]
    }
    assert len(orders) == 4


def test_a_turn_that_earned_nothing_has_a_reward_and_one_without_a_reward_has_none():
    paid = [TurnReward(2, 0.0), TurnReward(6, 1.0)]
    one = dataclasses.replace(rollout([1, 2, 3, 4, 5, 6, 7], reward=1.0), turn_rewards=paid)
    batch = read_batch([group("a", [one])], process_rewards=True)
    assert batch.process_rewards.tolist() == [0, 0, 0, 0, 0, 0, 1]
    assert batch.step_ends.int().tolist() == [0, 0, 1, 0, 0, 0, 1]
    assert not read_batch([group("a", [one])]).step_ends.any()


def cut(one):
    return dataclasses.replace(one, finish_reason=FinishReason.LENGTH)


def ranked(count=4, masked=()):
    """Return a group whose rewards fall from the first rollout on, some of them cut off."""
    rollouts = [rollout([1, 2, 3 + i], reward=float(count - i), index=i) for i in range(count)]
    return group("a", [cut(one) if i in masked else one for i, one in enumerate(rollouts)])


@pytest.mark.parametrize(
    ("advantage", "masked", "expected"),
    [
        ("best_of_n", (), [1, 0, 0, 0]),
        ("best_of_n", (0,), [0, 1, 0, 0]),
        ("best_of_n", (0, 1, 2), [0, 0, 0, 0]),  # alone, so without variance
        ("best_worst", (), [1, 0, 0, -1]),
        ("best_worst", (0, 3), [0, 1, -1, 0]),
        ("best_worst", (1,), [1, 0, 0, -1]),
        ("best_worst", (0, 1, 2), [0, 0, 0, 0]),
    ],
)
def test_the_best_and_the_worst_are_among_rollouts_that_may_train(advantage, masked, expected):
    batch = batch_of([ranked(masked=masked)], advantage=advantage, mask_truncated=True)
    values = batch.advantages.values
    assert values.tolist() == expected
    trained = torch.unique(batch.tokens.sequence_ids[batch.tokens.mask]).tolist()
    assert trained == values.nonzero().flatten().tolist()


def test_a_reward_that_is_good_enough_is_taken_of_a_rollout_that_may_train():
    settings = {"advantage": "best_of_n", "advantage_options": {"min_reward": 2.0, "top": 2}}
    batch = batch_of([ranked(masked=(0,))], mask_truncated=True, **settings)
    assert batch.advantages.values.tolist() == [0, 1, 1, 0]


def test_rollouts_whose_tokens_are_all_too_old_are_no_candidates():
    rollouts = [
        rollout([1, 2, 3], reward=float(i), versions=[9 if i < 2 else 1], index=i) for i in range(4)
    ]
    batch = read_batch([group("a", rollouts)], oldest_version=5)
    found = Objective(LearnerConfig(advantage="best_worst")).with_advantages(batch)
    assert found.advantages.values.tolist() == [-1, 1, 0, 0]

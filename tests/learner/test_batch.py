"""From rollout groups to micro-batches."""

import pytest
import torch
from rollouts import group, random_groups, rollout

from learner.batch import build_batch, split_groups
from learner.errors import LearnerError
from learner.work_plan import plan_rows


def built(groups, **changes):
    settings = {"advantage": "grpo", "advantage_options": {}, "aggregation": "token_mean"}
    return build_batch(groups, **{**settings, **changes})


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
    batch = built(random_groups())
    [plan] = plan_rows(batch.lengths, 1, capacity)
    rows = [batch.row(row) for row in plan]
    seen = torch.cat([row.sequence_ids for row in rows])
    assert torch.bincount(seen).tolist() == batch.lengths
    for row in rows:
        assert len(row.token_ids) <= capacity or len(torch.unique(row.sequence_ids)) == 1
        for sequence in torch.unique(row.sequence_ids).tolist():
            here = row.take((row.sequence_ids == sequence).nonzero().flatten())
            there = batch.tokens.take((batch.tokens.sequence_ids == sequence).nonzero().flatten())
            for name in here.__dataclass_fields__.keys() - {"proximal_logprobs"}:
                assert torch.equal(getattr(here, name), getattr(there, name)), name
        assert row.position_ids[0] == 0


def test_a_rollout_without_a_score_is_masked_out_of_every_count():
    groups = [group("a", [rollout([1, 2, 3], reward=float("nan")), rollout([1, 2, 3], reward=1.0)])]
    tokens = built(groups).tokens
    assert tokens.mask.tolist() == [False] * 5 + [True]
    assert tokens.token_weights.tolist() == [0.0] * 5 + [1.0]


def test_a_rollout_must_begin_with_a_token_that_was_not_sampled():
    groups = [group("a", [rollout([1, 2], prompt=0, index=3)])]
    with pytest.raises(LearnerError, match="group a, sample 3: a rollout must begin"):
        built(groups)


def test_an_empty_batch_is_refused():
    with pytest.raises(LearnerError, match="without rollouts"):
        built([])


def test_a_dummy_row_trains_nothing():
    row = built(TWO_GROUPS).row([])
    assert row.token_ids.tolist() == [3, 4]
    assert row.position_ids.tolist() == [0, 1]
    assert not row.mask.any()
    assert row.token_weights.tolist() == [0, 0]


def test_a_minibatch_is_whole_groups_with_weights_of_its_own():
    batch = built(TWO_GROUPS)
    first, second = batch.minibatch([0]), batch.minibatch([1])
    assert first.tokens.token_ids.tolist() == [3, 4, 5, 3, 4, 6, 1]
    assert first.tokens.sequence_ids.tolist() == [0] * 3 + [1] * 4
    torch.testing.assert_close(first.tokens.token_weights, first.tokens.mask / 3)
    torch.testing.assert_close(first.tokens.advantages, batch.tokens.advantages[:7])
    assert first.lengths == [3, 4]
    assert second.tokens.sequence_ids.tolist() == [2] * 3
    assert second.row([0]).token_weights.tolist() == [0, 1, 0]
    assert second.lengths == [3]
    assert batch.minibatch([1, 0]).tokens.token_weights.tolist() == (
        batch.tokens.token_weights.tolist()
    )


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

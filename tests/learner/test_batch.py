"""From rollout groups to micro-batches."""

import pytest
import torch
from rollouts import group, random_groups, rollout

from learner.batch import build_batch
from learner.errors import LearnerError


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
def test_microbatches_hold_whole_sequences_each_once(capacity):
    batch = built(random_groups())
    rows = list(batch.microbatches(capacity))
    seen = torch.cat([row.sequence_ids for row in rows])
    assert torch.bincount(seen).tolist() == batch.lengths
    for row in rows:
        assert len(row.token_ids) <= capacity or len(torch.unique(row.sequence_ids)) == 1
        for sequence in torch.unique(row.sequence_ids).tolist():
            here = row.take((row.sequence_ids == sequence).nonzero().flatten())
            there = batch.tokens.take((batch.tokens.sequence_ids == sequence).nonzero().flatten())
            for name in here.__dataclass_fields__:
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

"""Token weights: what each mode gives equal weight to, and invariance to how a batch is cut."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import InputError
from learner.batch.token_weights import token_weights

MODES = ["token_mean", "sequence_mean", "prompt_mean", "fixed_length"]

# Three sequences with 2, 1 and 0 tokens to train; groups {0, 1} and {2}.
MASK = torch.tensor([False, True, True, False, True, False, False])
SEQUENCES = torch.tensor([0, 0, 0, 1, 1, 2, 2])
GROUPS = torch.tensor([0, 0, 0, 0, 0, 1, 1])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_mean", [0, 1 / 3, 1 / 3, 0, 1 / 3, 0, 0]),
        ("sequence_mean", [0, 1 / 4, 1 / 4, 0, 1 / 2, 0, 0]),
        ("prompt_mean", [0, 1 / 3, 1 / 3, 0, 1 / 3, 0, 0]),
        ("fixed_length", [0, 1 / 30, 1 / 30, 0, 1 / 30, 0, 0]),
    ],
)
def test_each_mode_has_its_hand_computed_weights(mode, expected):
    weights = token_weights(mode, MASK, SEQUENCES, GROUPS, max_length=10)
    torch.testing.assert_close(weights, torch.tensor(expected))


def test_every_prompt_weighs_the_same_under_prompt_mean():
    mask = torch.ones(7, dtype=torch.bool)
    weights = token_weights("prompt_mean", mask, SEQUENCES, GROUPS)
    assert weights[:5].sum() == pytest.approx(0.5)
    assert weights[5:].sum() == pytest.approx(0.5)


@pytest.mark.parametrize("mode", MODES)
@given(bits=st.lists(st.booleans(), min_size=7, max_size=7))
def test_means_add_up_to_one_unless_nothing_trains(mode, bits):
    mask = torch.tensor(bits)
    total = float(token_weights(mode, mask, SEQUENCES, GROUPS, max_length=10).sum())
    if mode == "fixed_length":
        assert total == pytest.approx(sum(bits) / 30)
    else:
        assert total == pytest.approx(1.0 if any(bits) else 0.0)


def test_fixed_length_counts_sequences_that_are_wholly_masked():
    mask = torch.tensor([True, False, False])
    weights = token_weights("fixed_length", mask, torch.arange(3), max_length=2)
    assert weights[0] == pytest.approx(1 / 6)


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("mean", "'mean' is not one of token_mean, sequence_mean, prompt_mean, fixed_length"),
        ("prompt_mean", "needs group_ids"),
        ("fixed_length", "needs max_length >= 1: None"),
    ],
)
def test_a_mode_without_what_it_needs_is_refused(mode, message):
    with pytest.raises(InputError, match=message):
        token_weights(mode, MASK, SEQUENCES)

"""Importance weights: values, composition, what they must not touch."""

import math

import pytest
import torch

from learner import config
from learner.corrections import CORRECTIONS, importance_weights
from learner.errors import InputError
from learner.losses import LossInputs


def inputs(ratios, mask=None, proximal=None):
    ratios = torch.tensor(ratios, dtype=torch.float64)
    return LossInputs(
        logprobs=ratios.log().requires_grad_(),
        behavior_logprobs=torch.zeros_like(ratios),
        advantages=torch.ones_like(ratios),
        mask=torch.ones(len(ratios), dtype=torch.bool) if mask is None else torch.tensor(mask),
        sequence_ids=torch.zeros(len(ratios), dtype=torch.int64),
        proximal_logprobs=None if proximal is None else torch.tensor(proximal).double().log(),
    )


def test_truncation_keeps_small_ratios_and_caps_large_ones():
    found = importance_weights("tis", inputs([0.5, 1.0, 2.0, 3.0]))
    torch.testing.assert_close(found.weights, torch.tensor([0.5, 1.0, 2.0, 2.0]).double())
    assert found.keep.all()
    assert found.stats["truncated"].item() == 1


def test_weights_are_detached():
    assert not importance_weights("tis", inputs([0.5])).weights.requires_grad


def test_the_numerator_is_the_proximal_policy_where_there_is_one():
    found = importance_weights("tis", inputs([9.0], proximal=[1.5]))
    torch.testing.assert_close(found.weights, torch.tensor([1.5]).double())


def test_weights_are_one_where_proximal_and_behaviour_agree():
    assert importance_weights("tis", inputs([7.0, 0.1], proximal=[1.0, 1.0])).weights.tolist() == [
        1.0,
        1.0,
    ]


def test_none_counts_every_token_once():
    assert importance_weights("none", inputs([0.5, 9.0])).weights.tolist() == [1.0, 1.0]


def test_masked_tokens_weigh_one_and_are_not_counted():
    found = importance_weights("tis", inputs([9.0, math.inf], mask=[False, False]))
    assert found.weights.tolist() == [1.0, 1.0]
    assert found.stats["truncated"].item() == 0


def test_several_corrections_multiply():
    found = importance_weights(["none", "tis", "tis"], inputs([3.0]), cap=1.5)
    assert found.weights.tolist() == [2.25]


def test_no_corrections_at_all_count_every_token_once():
    assert importance_weights([], inputs([3.0])).weights.tolist() == [1.0]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("tis", {"clip": 2.0}, "no option clip; its options: cap"),
        ("none", {"cap": 2.0}, "no option cap; its options: none"),
        ("tis", {"cap": 0.0}, "needs cap > 0, found 0.0"),
        ("tiss", {}, "did you mean 'tis'"),
    ],
)
def test_bad_settings_are_refused(name, options, message):
    with pytest.raises(InputError, match=message):
        importance_weights(name, inputs([1.0]), **options)


def test_the_registry_holds_what_the_configuration_allows():
    assert set(CORRECTIONS) == set(config.CORRECTIONS)

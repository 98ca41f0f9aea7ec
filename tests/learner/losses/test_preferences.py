"""Losses of preferences: values by hand, gradients by finite differences."""

import math

import pytest
import torch

from learner.losses.preferences import PREFERENCE_LOSSES


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


def sigmoid(value):
    return 1 / (1 + math.exp(-value))


@pytest.mark.parametrize(
    ("name", "better", "worse", "options", "expected"),
    [
        ("dpo", 0.0, 0.0, {}, math.log(2)),
        ("dpo", 3.0, -2.0, {"beta": 0.2}, -math.log(sigmoid(1.0))),
        (
            "dpo",
            3.0,
            -2.0,
            {"beta": 0.2, "label_smoothing": 0.1},
            -0.9 * math.log(sigmoid(1)) - 0.1 * math.log(sigmoid(-1)),
        ),
        ("dpo", -5e3, 5e3, {"beta": 1.0}, 1e4),
        ("ipo", 0.5, 0.25, {"beta": 2.0}, 0.0),
        ("ipo", 0.0, 0.0, {"beta": 0.1}, 25.0),
        ("simpo", -1.0, -1.5, {"beta": 2.0, "gamma": 1.0}, math.log(2)),
        ("simpo", -1.0, -1.5, {"beta": 2.0, "gamma": 0.0}, -math.log(sigmoid(1.0))),
        ("orpo", math.log(0.5), math.log(0.5), {"beta": 0.3}, 0.3 * math.log(2)),
        ("orpo", math.log(0.75), math.log(0.5), {"beta": 1.0}, -math.log(3 / 4)),
        ("orpo", -1e-12, -800.0, {"beta": 1.0}, 0.0),
    ],
)
def test_losses_of_pairs_are_the_formulas(name, better, worse, options, expected):
    loss = PREFERENCE_LOSSES[name].function(double(better), double(worse), **options)
    assert loss.item() == pytest.approx(expected, abs=1e-12)


def test_kto_weighs_desirable_and_undesirable_texts():
    options = {"beta": 0.5, "desirable_weight": 1.5, "undesirable_weight": 0.7}
    margins, labels = double(2.0, 2.0), torch.tensor([True, False])
    loss = PREFERENCE_LOSSES["kto"].function(margins, labels, **options)
    torch.testing.assert_close(loss, double(1.5, 0.7) * (1 - sigmoid(1.0)), rtol=1e-14, atol=0)


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_gradients_are_those_of_finite_differences(name):
    loss = PREFERENCE_LOSSES[name].function
    first = -double(0.2, 1.0, 3.0, 0.7).requires_grad_()
    second = -double(1.5, 0.3, 2.9, 0.7).requires_grad_()
    if name == "kto":
        second = torch.tensor([True, False, True, False])
    assert torch.autograd.gradcheck(loss, (first, second))


@pytest.mark.parametrize("certain", ["chosen", "rejected"])
def test_a_completion_of_probability_one_has_a_finite_loss_and_gradient_under_orpo(certain):
    values = {name: double(0.0 if name == certain else -1.0) for name in ("chosen", "rejected")}
    for value in values.values():
        value.requires_grad_()
    loss = PREFERENCE_LOSSES["orpo"].function(**values)
    loss.sum().backward()
    assert loss.isfinite().all()
    assert all(value.grad.isfinite().all() for value in values.values())

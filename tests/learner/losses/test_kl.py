"""KL estimates by hand, terms of the loss, rewards, the controller."""

import math

import pytest
import torch

from learner.errors import InputError
from learner.losses import LossInputs
from learner.losses.kl import adapted_coefficient, kl_loss, kl_penalty, kl_rewards


def log(*values):
    return torch.tensor(values, dtype=torch.float64).log()


def row(current, behavior, reference):
    """Return a row of one sequence, from probabilities."""
    current = log(*current).requires_grad_()
    return LossInputs(
        logprobs=current,
        behavior_logprobs=log(*behavior),
        advantages=torch.ones_like(current),
        mask=torch.ones(len(current), dtype=torch.bool),
        sequence_ids=torch.zeros(len(current), dtype=torch.int64),
        reference_logprobs=log(*reference),
    )


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", [math.log(2), -math.log(4)]),
        ("k2", [math.log(2) ** 2 / 2, math.log(4) ** 2 / 2]),
        ("k3", [0.5 - 1 + math.log(2), 4 - 1 - math.log(4)]),
    ],
)
def test_estimates_by_hand(estimator, expected):
    found = kl_penalty(estimator, log(0.5, 0.1), log(0.25, 0.4))
    assert found.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_only_the_input_is_clamped(estimator):
    far = kl_penalty(estimator, torch.tensor([-50.0]), torch.tensor([0.0]))
    edge = kl_penalty(estimator, torch.tensor([-20.0]), torch.tensor([0.0]))
    assert far.item() == edge.item()
    assert abs(far.item()) >= 20


def test_a_small_difference_keeps_its_precision_in_float32():
    found = kl_penalty("k3", torch.tensor([1e-4]), torch.tensor([0.0]))
    assert found.item() == pytest.approx(5e-9, rel=0.5)
    assert found.item() >= 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_masked_or_not_finite_is_zero_in_value_and_gradient(bad):
    policy = torch.tensor([bad, -1.0, -1.0, -2.0], requires_grad=True)
    reference = torch.tensor([-1.0, bad, bad, -1.0])
    found = kl_penalty("k3", policy, reference, mask=torch.tensor([True, True, False, True]))
    found.sum().backward()
    assert found[:3].tolist() == [0.0] * 3
    assert policy.grad[:3].tolist() == [0.0] * 3
    assert policy.grad[3].item() == pytest.approx(1 - math.e)


def test_the_default_term_pulls_by_the_capped_ratio_and_reports_k3():
    # r = 8 capped at 5 and r = 0.5; d = log 2.
    inputs = row([0.8, 0.2], [0.1, 0.4], [0.4, 0.1])
    found = kl_loss("weighted_k2", inputs)
    k3 = 0.5 - 1 + math.log(2)
    assert found.per_token.tolist() == pytest.approx([5 * k3, 0.5 * k3])
    assert found.stats["kl"].item() == pytest.approx(5.5 * k3)
    (gradient,) = torch.autograd.grad(found.per_token.sum(), inputs.logprobs)
    assert gradient.tolist() == pytest.approx([5 * math.log(2), 0.5 * math.log(2)])


def test_a_term_without_a_reference_is_refused():
    inputs = row([0.5], [0.5], [0.5])
    object.__setattr__(inputs, "reference_logprobs", None)
    with pytest.raises(InputError, match="comparison with the reference needs reference_logprobs"):
        kl_loss("k3", inputs)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kl_penalty("k4", log(0.5), log(0.5)), "is 'k4'; allowed: k1, k2, k3"),
        (lambda: kl_loss("k4", row([1.0], [1.0], [1.0])), "allowed: k1, k2, k3, ratio_k1"),
        (lambda: kl_loss("k3", row([1.0], [1.0], [1.0]), cap=0.0), "cap needs to be > 0"),
        (
            lambda: kl_rewards(log(1.0), log(1.0), torch.tensor([True]), coefficient=-1.0),
            "must be a finite number >= 0, found -1.0",
        ),
    ],
)
def test_bad_settings_are_refused(call, message):
    with pytest.raises(InputError, match=message):
        call()


def test_rewards_are_minus_the_coefficient_times_k1_and_carry_no_gradient():
    policy = log(0.5, 0.5, 0.5).requires_grad_()
    mask = torch.tensor([True, True, False])
    found = kl_rewards(policy, log(0.25, 1.0, 0.25), mask, coefficient=0.2)
    assert found.tolist() == pytest.approx([-0.2 * math.log(2), 0.2 * math.log(2), 0.0])
    assert not found.requires_grad


@pytest.mark.parametrize(
    ("kl", "samples", "factor"),
    [
        (1.0, 500, 1.0),
        (1.1, 500, 1 + 0.1 * 0.05),
        (50.0, 500, 1 + 0.2 * 0.05),
        (0.0, 500, 1 - 0.2 * 0.05),
        (50.0, 20_000, 1.2),  # a batch beyond the horizon
        (0.0, 20_000, 0.8),
    ],
)
def test_the_controller_moves_by_the_clipped_error(kl, samples, factor):
    after = adapted_coefficient(0.1, kl, target=1.0, horizon=10_000, samples=samples)
    assert after == pytest.approx(0.1 * factor)

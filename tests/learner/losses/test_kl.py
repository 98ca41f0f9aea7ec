"""KL estimates by hand, terms of the loss, rewards, the controller."""

import math

import pytest
import torch
from packed_sequences import one_row

from headway.errors import InputError
from learner.losses.kl import adapted_coefficient, kl_loss, kl_penalty


def log(*values):
    return torch.tensor(values, dtype=torch.float64).log()


def row(current, behavior, reference):
    """Return a row of one sequence, from probabilities."""
    current = log(*current).requires_grad_()
    return one_row(current, behavior_logprobs=log(*behavior), reference_logprobs=log(*reference))


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


FAR = torch.tensor([-60.0, -35.0, -20.5, 20.5, 35.0, 60.0], dtype=torch.float64)
"""Log-ratios of policy and reference beyond the bound of exponents."""


@pytest.mark.parametrize(
    ("estimator", "derivative"), [("k1", torch.ones_like(FAR)), ("k2", FAR), ("k3", None)]
)
def test_far_from_the_reference_the_estimate_is_exact_unless_its_exponent_is_bounded(
    estimator, derivative
):
    policy = FAR.clone().requires_grad_()
    found = kl_penalty(estimator, policy, torch.zeros_like(FAR))
    (gradient,) = torch.autograd.grad(found.sum(), policy)
    if derivative is not None:
        assert torch.equal(gradient, derivative)
        assert torch.equal(found.detach(), FAR if estimator == "k1" else FAR**2 / 2)
        return
    # Where the exponent is bounded, k3 is that of −20 nats; beyond +20 it grows on.
    expected = [math.exp(20) - 21] * 3 + [math.exp(-d) - 1 + d for d in FAR[3:].tolist()]
    assert found.tolist() == pytest.approx(expected, rel=1e-12)
    assert gradient.tolist() == pytest.approx([0.0] * 3 + [1.0] * 3)


RATIOS = [0.3, -1.2, 2.0, -25.0, 4.0, 0.0]
"""Log-ratios of current and behaviour policy; the fourth is beyond the bound."""


@pytest.mark.parametrize("form", ["k1", "k2", "weighted_k2", "ratio_k1"])
def test_the_pull_of_forms_without_an_exponent_goes_on_beyond_20_nats(form):
    """Against finite differences of the formulas, the weight of weighted_k2 held fixed."""
    behavior = -torch.tensor(RATIOS, dtype=torch.float64)

    def by_hand(index, policy):
        d, ratio = FAR[index].item() + policy, math.exp(max(-20.0, RATIOS[index] + policy))
        fixed = min(5.0, math.exp(max(-20.0, RATIOS[index])))
        return {"k1": d, "k2": d * d / 2, "weighted_k2": fixed * d * d / 2, "ratio_k1": ratio * d}[
            form
        ]

    policy = torch.zeros_like(FAR, requires_grad=True)
    inputs = one_row(policy, behavior_logprobs=behavior, reference_logprobs=-FAR)
    (gradient,) = torch.autograd.grad(kl_loss(form, inputs).per_token.sum(), policy)
    step = 1e-6
    expected = [(by_hand(i, step) - by_hand(i, -step)) / (2 * step) for i in range(6)]
    assert gradient.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert (gradient != 0).all()


@pytest.mark.parametrize("form", ["k3", "ratio_k3", "weighted_k2"])
def test_forms_with_an_exponent_stay_finite_in_float32(form):
    far = torch.tensor([-600.0, 600.0, -90.0, 90.0], requires_grad=True)
    behavior = torch.tensor([0.0, 0.0, 300.0, -300.0])
    inputs = one_row(far, behavior_logprobs=behavior, reference_logprobs=torch.zeros(4))
    term = kl_loss(form, inputs)
    (gradient,) = torch.autograd.grad(term.per_token.sum(), far)
    assert torch.isfinite(term.per_token).all()
    assert torch.isfinite(gradient).all()


def test_k1_counts_the_whole_distance():
    assert kl_penalty("k1", torch.tensor([-50.0]), torch.tensor([0.0])).item() == -50.0


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
    with pytest.raises(InputError, match="comparison with the reference needs reference_logprobs"):
        kl_loss("k3", one_row(log(0.5)))


def test_another_estimator_is_refused():
    with pytest.raises(InputError, match="is 'k4'; allowed: k1, k2, k3"):
        kl_penalty("k4", log(0.5), log(0.5))


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

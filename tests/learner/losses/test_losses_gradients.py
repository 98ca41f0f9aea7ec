"""Every objective against a plain padded implementation: values, and finite differences."""

import numpy as np
import padded_losses
import pytest
import torch
from packed_sequences import pad, random_sequences

from learner.config.traits import CORRECTIONS, LOSSES
from learner.corrections import importance_weights
from learner.losses import policy_loss
from learner.losses.kl import FORMS, kl_loss
from learner.losses.regularisers import entropy_bonus, positive_nll

CLIP = {"clip_low": 0.2, "clip_high": 0.3}
DECOUPLED = {**CLIP, "dual_clip": 1.5, "cap": 1.2, "fresh": "current"}
CASES = [
    ("reinforce", {}),
    ("ppo", CLIP),
    ("ppo", {**CLIP, "dual_clip": 1.4}),
    ("grpo", CLIP),
    ("dapo", {"clip_low": 0.2, "clip_high": 0.28}),
    ("cispo", {"cap_low": 0.8, "cap_high": 1.3}),
    ("gspo", {"clip_low": 0.1, "clip_high": 0.2}),
    ("gspo_token", {"clip_low": 0.1, "clip_high": 0.2}),
    ("sapo", {"tau_positive": 1.0, "tau_negative": 1.05}),
    ("topr", {"level": "sequence"}),
    ("topr", {"level": "token"}),
    ("kimi", {"tau": 0.3, "variant": "k1.5"}),
    ("kimi", {"tau": 0.3, "variant": "k2"}),
    ("kimi", {"tau": 0.3, "variant": "token_sq"}),
    ("raft", {"keep": "positive"}),
    ("raft", {"keep": "best"}),
    ("decoupled_ppo", {**DECOUPLED, "proximal": "recompute"}),
    ("decoupled_ppo", {**DECOUPLED, "proximal": "detach"}),
    ("decoupled_ppo", {**DECOUPLED, "proximal": "loglinear"}),
    ("decoupled_ppo", {**DECOUPLED, "proximal": "linear"}),
    ("decoupled_ppo", {**DECOUPLED, "proximal": "loglinear", "fresh": "behavior"}),
    ("dpo", {"beta": 0.5, "label_smoothing": 0.1, "variant": "sigmoid"}),
    ("dpo", {"beta": 0.5, "label_smoothing": 0.0, "variant": "ipo"}),
]


def compare(reference, found, inputs, **options):
    """Values, and gradients under random token weights."""
    padded = pad(inputs)
    expected = padded.pack(reference(padded, padded.frozen, **options))
    expected = np.where(inputs.mask, expected, 0.0)
    np.testing.assert_allclose(found.per_token.detach().numpy(), expected, rtol=1e-10, atol=1e-12)
    weights = torch.rand(
        len(expected), generator=torch.Generator().manual_seed(5), dtype=torch.float64
    )
    (gradient,) = torch.autograd.grad((weights * found.per_token).sum(), inputs.logprobs)
    slopes = padded_losses.finite_difference(reference, padded, padded.unpack(weights), **options)
    np.testing.assert_allclose(gradient.numpy(), slopes, rtol=1e-6, atol=1e-8)


def has_what_it_needs(options, proximal):
    return proximal or options.get("proximal") != "recompute"


@pytest.mark.parametrize(
    ("name", "options", "proximal"),
    [
        (*case, proximal)
        for case in CASES
        for proximal in (False, True)
        if has_what_it_needs(case[1], proximal)
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", [0, 1])
def test_packed_losses_equal_padded_ones_and_their_finite_differences(
    name, options, proximal, seed
):
    inputs = random_sequences(seed, proximal=proximal)
    reference = getattr(padded_losses, name.replace("grpo", "ppo"))
    compare(reference, policy_loss(name, inputs, **options), inputs, **options)


def test_every_loss_is_compared():
    assert {name for name, _ in CASES} == set(LOSSES)


@pytest.mark.parametrize("form", FORMS)
def test_kl_terms_equal_padded_ones_and_their_finite_differences(form):
    inputs = random_sequences(2)
    compare(padded_losses.kl, kl_loss(form, inputs, cap=1.3), inputs, form=form, cap=1.3)


def test_the_likelihood_of_positives_equals_its_padded_value_and_finite_differences():
    options = {"total": 9.0, "threshold": 0.5}
    inputs = random_sequences(3)
    compare(padded_losses.positive_nll, positive_nll(inputs, **options), inputs, **options)


def test_the_entropy_bonus_is_minus_the_entropy_of_trained_tokens():
    inputs = random_sequences(3)
    found = entropy_bonus(inputs)
    expected = torch.where(inputs.mask, -inputs.entropies, 0.0)
    torch.testing.assert_close(found.per_token, expected)
    (gradient,) = torch.autograd.grad(found.per_token.sum(), inputs.entropies)
    assert gradient.tolist() == (-inputs.mask.double()).tolist()


SETTINGS = {"kl_mask": {"threshold": 0.05}, "lag_mask": {"max_lag": 1}}


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
def test_corrections_carry_no_gradient_and_scale_that_of_the_loss(name):
    inputs = random_sequences(4, proximal=True)
    found = importance_weights(name, inputs, **SETTINGS.get(name, {}))
    assert not found.weights.requires_grad
    scale = torch.where(found.keep, found.weights, 0.0)
    loss = policy_loss("reinforce", inputs).per_token
    (gradient,) = torch.autograd.grad((scale * loss).sum(), inputs.logprobs)
    expected = torch.where(inputs.mask, -scale * inputs.advantages, 0.0)
    torch.testing.assert_close(gradient, expected)

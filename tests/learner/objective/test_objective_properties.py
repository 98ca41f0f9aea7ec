"""What objectives claim in expectation, where they agree, and how they take bad numbers.

Expectations are exact: a sum over every outcome of a small softmax, weighed by its probability.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from packed_sequences import one_row, random_sequences, sequence_mean

from learner.config.traits import CORRECTIONS, LOSSES
from learner.corrections import importance_weights
from learner.losses import LossInputs, policy_loss
from learner.losses.kl import FORMS, kl_loss, kl_penalty
from learner.losses.regularisers import entropy_bonus, positive_nll

NO_CLIP = {"clip_low": 1.0, "clip_high": 1e9}
SETTINGS = {"kl_mask": {"threshold": 0.05}, "lag_mask": {"max_lag": 1}}


def policies(words=5, count=3):
    """Logits [words] with gradient of the current policy, and log-probabilities of two others."""
    make = torch.Generator().manual_seed(11)
    logits = torch.randn(count, words, generator=make, dtype=torch.float64)
    first, *others = logits
    return first.requires_grad_(), [other.log_softmax(-1) for other in others]


def one_token_row(logits, behavior, gains, **changes):
    """Every word once, each a sequence of one token."""
    words = torch.arange(len(logits))
    columns = {"behavior_logprobs": behavior, "advantages": gains}
    columns |= {"sequence_ids": words, "group_ids": words}
    return one_row(logits.log_softmax(-1), **columns | changes)


def slope(value, logits):
    # The graph is kept: a row's ratios are computed once, and shared by all that is made of them.
    return torch.autograd.grad(value, logits, retain_graph=True)[0]


GAINS = torch.tensor([1.0, -0.5, 2.0, 0.3, -1.5], dtype=torch.float64)


@pytest.mark.parametrize(
    ("loss", "options", "correction", "correction_options"),
    [
        ("reinforce", {}, "tis", {"cap": 1e9}),
        ("reinforce", {}, "mis", {"high": 1e9}),
        ("reinforce", {}, "icepop", {"low": 0.0, "high": 1e9}),
        ("reinforce", {}, "sequence_tis", {"cap": 1e9}),
        ("reinforce", {}, "sequence_mis", {"high": 1e9}),
        ("cispo", {"cap_high": 1e9}, "none", {}),
        ("ppo", NO_CLIP, "none", {}),
        ("dapo", NO_CLIP, "none", {}),
        ("gspo", NO_CLIP, "none", {}),
        ("gspo_token", NO_CLIP, "none", {}),
        ("decoupled_ppo", {**NO_CLIP, "cap": None, "proximal": "detach"}, "none", {}),
    ],
)
def test_uncapped_objectives_have_the_gradient_of_the_expected_reward(
    loss, options, correction, correction_options
):
    logits, (behavior, _) = policies()
    inputs = one_token_row(logits, behavior, GAINS)
    weights = importance_weights(correction, inputs, **correction_options).weights
    per_token = weights * policy_loss(loss, inputs, **options).per_token
    found = slope(-(behavior.exp() * per_token).sum(), logits)
    expected = slope((logits.softmax(-1) * GAINS).sum(), logits)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("proximal", ["recompute", "loglinear", "linear"])
@pytest.mark.parametrize("correction", [None, "tis"])
def test_a_decoupled_objective_is_unbiased_whatever_the_proximal_policy(proximal, correction):
    logits, (behavior, middle) = policies()
    versions = torch.tensor([3, 4, 2, 1, 3])
    inputs = one_token_row(
        logits, behavior, GAINS, proximal_logprobs=middle, versions=versions, version=4
    )
    if correction is None:
        options = {**NO_CLIP, "cap": None, "proximal": proximal}
        per_token = policy_loss("decoupled_ppo", inputs, **options).per_token
    else:
        weights = importance_weights("tis", inputs, cap=1e9).weights
        per_token = weights * policy_loss("ppo", inputs, **NO_CLIP).per_token
    found = slope(-(behavior.exp() * per_token).sum(), logits)
    torch.testing.assert_close(found, slope((logits.softmax(-1) * GAINS).sum(), logits))


def two_token_row(words=3):
    """Every sequence of two words, packed, with its reward.

    Returns what is differentiated, the row, and the probability that each sequence is sampled.
    """
    make = torch.Generator().manual_seed(4)
    shape = (words + 1, words)  # first word, then one row for each first word
    table = torch.randn(shape, generator=make, dtype=torch.float64).requires_grad_()
    sampler = torch.randn(shape, generator=make, dtype=torch.float64).log_softmax(-1)
    pairs = torch.tensor(list(itertools.product(range(words), repeat=2)))

    def scores(policy):
        return torch.stack([policy[0, pairs[:, 0]], policy[1 + pairs[:, 0], pairs[:, 1]]], 1)

    rewards = torch.randn(len(pairs), generator=make, dtype=torch.float64)
    behavior = scores(sampler)
    inputs = one_row(
        scores(table.log_softmax(-1)).flatten(),
        behavior_logprobs=behavior.flatten(),
        advantages=rewards.repeat_interleave(2),
        sequence_ids=torch.arange(len(pairs)).repeat_interleave(2),
    )
    expected = slope((inputs.logprobs.view(-1, 2).sum(1).exp() * rewards).sum(), table)
    return table, inputs, behavior.sum(1).exp(), expected


@pytest.mark.parametrize("name", ["sequence_tis", "sequence_mis"])
def test_the_product_ratio_is_unbiased_for_sequences_and_the_token_ratio_is_not(name):
    table, inputs, sampled, expected = two_token_row()

    def gradient(correction, **options):
        weights = importance_weights(correction, inputs, **options).weights
        per_token = weights * policy_loss("reinforce", inputs).per_token
        total = (sampled * per_token.view(-1, 2).sum(1)).sum()
        return slope(-total, table)

    bound = {"cap": 1e9} if name == "sequence_tis" else {"high": 1e9}
    torch.testing.assert_close(gradient(name, **bound), expected)
    assert not torch.allclose(gradient("tis", cap=1e9), expected, atol=1e-2)


def kl_divergence(first, second):
    return (first.exp() * (first - second)).sum()


@pytest.mark.parametrize("off_policy", [False, True])
def test_kl_terms_have_the_expected_gradients_that_they_are_documented_with(off_policy):
    logits, (other, reference) = policies()
    current = logits.log_softmax(-1)
    behavior = other if off_policy else current.detach()
    inputs = one_token_row(logits, behavior, GAINS, reference_logprobs=reference)

    def expected_slope(form):
        per_token = kl_loss(form, inputs, cap=1e9).per_token
        total = (behavior.exp() * per_token).sum()
        return slope(total, logits)

    right = slope(kl_divergence(logits.log_softmax(-1), reference), logits)
    for form in ("weighted_k2", "ratio_k1", "ratio_k3"):
        torch.testing.assert_close(expected_slope(form), right, msg=form)
    biased = {form: not torch.allclose(expected_slope(form), right) for form in ("k1", "k2", "k3")}
    assert biased == {"k1": True, "k2": off_policy, "k3": True}
    if not off_policy:
        forward = slope(kl_divergence(reference, logits.log_softmax(-1)), logits)
        torch.testing.assert_close(expected_slope("k3"), forward)
        torch.testing.assert_close(expected_slope("k1"), torch.zeros_like(right))


@pytest.mark.parametrize("form", ["weighted_k2", "ratio_k1", "ratio_k3"])
def test_kl_terms_with_a_ratio_have_the_expected_value_of_the_kl(form):
    logits, (behavior, reference) = policies()
    inputs = one_token_row(logits, behavior, GAINS, reference_logprobs=reference)
    found = kl_loss(form, inputs, cap=1e9)
    expected = kl_divergence(logits.log_softmax(-1), reference)
    torch.testing.assert_close((behavior.exp() * found.per_token).sum(), expected)


def test_kl_in_the_reward_has_the_gradient_of_the_kl_of_whole_sequences():
    table, inputs, _, _ = two_token_row()
    reference = inputs.behavior_logprobs
    sampled = inputs.logprobs.detach().view(-1, 2).sum(1).exp()
    rewards = -kl_penalty("k1", inputs.logprobs.detach(), reference).view(-1, 2)
    returns = rewards.flip(1).cumsum(1).flip(1).flatten()
    loss = policy_loss("reinforce", replace(inputs, advantages=returns)).per_token
    total = (sampled * loss.view(-1, 2).sum(1)).sum()
    found = slope(total, table)
    both = inputs.logprobs.view(-1, 2).sum(1), reference.view(-1, 2).sum(1)
    torch.testing.assert_close(found, slope(kl_divergence(*both), table))


# Where objectives agree.

LIKE_REINFORCE = [
    ("ppo", {}),
    ("dapo", {}),
    ("cispo", {}),
    ("sapo", {}),
    ("gspo", {}),
    ("gspo_token", {}),
    ("topr", {}),
    ("topr", {"level": "token"}),
    ("kimi", {"variant": "token_sq"}),
    ("decoupled_ppo", {"proximal": "detach"}),
    ("decoupled_ppo", {"proximal": "recompute"}),
    ("decoupled_ppo", {"proximal": "loglinear"}),
    ("decoupled_ppo", {"proximal": "linear"}),
]


@pytest.mark.parametrize(("name", "options"), LIKE_REINFORCE, ids=str)
def test_on_policy_the_gradient_is_that_of_reinforce_at_equal_aggregation(name, options):
    inputs = random_sequences(6, spread=0.0)
    inputs = replace(inputs, proximal_logprobs=inputs.logprobs.detach())
    gradients = [
        slope(sequence_mean(inputs, policy_loss(loss, inputs, **chosen).per_token), inputs.logprobs)
        for loss, chosen in ((name, options), ("reinforce", {}))
    ]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
def test_weights_are_one_where_proximal_and_behaviour_agree(name):
    inputs = random_sequences(8)
    inputs = replace(inputs, proximal_logprobs=inputs.behavior_logprobs)
    weights = importance_weights(name, inputs, **SETTINGS.get(name, {})).weights
    assert weights.tolist() == [1.0] * len(weights)


# Bad numbers.

HARD = {"raft": {"keep": "best"}}


def objectives():
    """Every loss, correction and term as a function of a row, by name."""
    for name in LOSSES:
        yield name, lambda row, name=name: policy_loss(name, row, **HARD.get(name, {}))
    for name in CORRECTIONS:
        yield (
            f"correction {name}",
            lambda row, name=name: importance_weights(name, row, **SETTINGS.get(name, {})),
        )
    for form in FORMS:
        yield f"kl {form}", lambda row, form=form: kl_loss(form, row)
    yield "positive_nll", lambda row: positive_nll(row, total=3)
    yield "entropy_bonus", entropy_bonus


OBJECTIVES = dict(objectives())


def outcome(objective, inputs):
    """Return finite results per token, their gradient in the log-probabilities, and the counts."""
    found = objective(inputs)
    values = found.weights if hasattr(found, "weights") else found.per_token
    assert torch.isfinite(values).all()
    assert all(math.isfinite(value.item()) for value in found.stats.values())
    if not values.requires_grad or objective is entropy_bonus:
        return values, None
    gradient = slope(values.sum(), inputs.logprobs)
    assert torch.isfinite(gradient).all()
    return values, gradient


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", ["logprobs", "behavior_logprobs", "proximal_logprobs"])
def test_a_valid_token_without_a_finite_log_probability_is_as_if_it_were_masked(name, bad, field):
    inputs = random_sequences(10, proximal=True)
    at = int(inputs.mask.nonzero()[3])
    values = getattr(inputs, field).detach().clone()
    values[at] = bad
    spoilt = replace(inputs, **{field: values.requires_grad_(field == "logprobs")})
    assert int(inputs.mask.sum() - spoilt.trained.sum()) == 1
    without = inputs.mask.clone()
    without[at] = False
    found = outcome(OBJECTIVES[name], spoilt)
    torch.testing.assert_close(found, outcome(OBJECTIVES[name], replace(inputs, mask=without)))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_what_is_masked_out_may_be_anything(name):
    inputs = random_sequences(10, proximal=True)
    values = {}
    for field in (
        "logprobs",
        "behavior_logprobs",
        "proximal_logprobs",
        "reference_logprobs",
        "advantages",
    ):
        bad = torch.tensor([math.nan, math.inf, -math.inf, 60.0], dtype=torch.float64)
        spoilt = torch.where(
            inputs.mask,
            getattr(inputs, field).detach(),
            bad.repeat(10)[: len(inputs.mask)].roll(len(values)),
        )
        values[field] = spoilt.requires_grad_(field == "logprobs")
    found, gradient = outcome(OBJECTIVES[name], replace(inputs, **values))
    expected, expected_gradient = outcome(OBJECTIVES[name], inputs)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient, expected_gradient)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_nothing_to_train_gives_a_finite_zero_with_a_graph(name):
    inputs = random_sequences(10, proximal=True)
    inputs = replace(inputs, mask=torch.zeros_like(inputs.mask))
    values, gradient = outcome(OBJECTIVES[name], inputs)
    neutral = 1.0 if name.startswith("correction") else 0.0
    assert values.tolist() == pytest.approx([neutral] * len(values), abs=0)
    assert gradient is None or gradient.abs().sum().item() == 0.0


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("shift", [50.0, -50.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_ratios_of_fifty_are_finite(name, shift, dtype):
    inputs = random_sequences(12, proximal=True)
    fields = ("behavior_logprobs", "proximal_logprobs", "reference_logprobs")
    shifts = dict(zip(fields, (shift, -shift, shift), strict=True))
    changed = {name: (getattr(inputs, name) + by).to(dtype) for name, by in shifts.items()}
    current = inputs.logprobs.detach().to(dtype).requires_grad_()
    outcome(OBJECTIVES[name], replace(inputs, logprobs=current, **changed))


@pytest.mark.parametrize("name", ["ppo", "cispo", "gspo", "gspo_token", "sapo", "decoupled_ppo"])
def test_ratios_that_are_bounded_are_counted(name):
    inputs = random_sequences(12, proximal=True)
    inputs = replace(inputs, proximal_logprobs=inputs.proximal_logprobs - 50)
    counted = policy_loss(name, inputs).stats["ratio_bounded"].item()
    assert counted == inputs.mask.sum().item()


def test_weights_that_are_bounded_are_counted():
    inputs = random_sequences(12, proximal=True)
    inputs = replace(inputs, behavior_logprobs=inputs.behavior_logprobs - 50)
    stats = importance_weights(["tis", "sequence_tis"], inputs).stats
    assert stats["weight_bounded"] == stats["sequence_bounded"] == inputs.mask.sum()


def test_a_product_over_a_sequence_is_bounded_once_not_token_by_token():
    ratios = torch.tensor([-30.0, 29.0], dtype=torch.float64)
    weights = importance_weights("sequence_tis", one_row(ratios)).weights
    assert weights.tolist() == pytest.approx([math.exp(-1)] * 2)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_missing_reference_masks_the_token_only_where_the_reference_is_used(name):
    inputs = random_sequences(13, proximal=True)
    at = int(inputs.mask.nonzero()[2])
    reference = inputs.reference_logprobs.clone()
    reference[at] = -math.inf
    spoilt = replace(inputs, reference_logprobs=reference)
    values, gradient = outcome(OBJECTIVES[name], spoilt)
    if name == "dpo" or name.startswith("kl "):
        assert gradient[at].item() == 0.0
        assert OBJECTIVES[name](spoilt).stats["reference_not_finite"].item() == 1
    else:
        torch.testing.assert_close(values, outcome(OBJECTIVES[name], inputs)[0])


# What the numbers do not depend on.


@pytest.mark.parametrize("name", OBJECTIVES)
def test_neither_the_order_of_groups_nor_their_sharing_of_a_row_matters(name):
    inputs = random_sequences(14, proximal=True)
    whole, gradient = outcome(OBJECTIVES[name], inputs)
    for group in torch.unique(inputs.group_ids).flip(0):
        here = (inputs.group_ids == group).nonzero().flatten()
        part = {
            key: value[here].detach()
            for key, value in vars(inputs).items()
            if isinstance(value, torch.Tensor) and key in LossInputs.__dataclass_fields__
        }
        part["logprobs"].requires_grad_()
        part["entropies"].requires_grad_()
        found, slopes = outcome(OBJECTIVES[name], LossInputs(**part, version=inputs.version))
        torch.testing.assert_close(found, whole[here])
        if gradient is not None:
            torch.testing.assert_close(slopes, gradient[here])

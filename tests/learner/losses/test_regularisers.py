"""Likelihood of positives, entropy bonus, its controller."""

from dataclasses import replace

import pytest
from packed_sequences import random_sequences

from headway.errors import InputError
from learner.losses.regularisers import (
    adapted_entropy_coefficient,
    entropy_bonus,
    positive_nll,
    positive_tokens,
)


def test_likelihood_of_positives_is_a_mean_over_the_whole_batch_however_it_is_cut():
    whole = random_sequences(0)
    right = positive_tokens(whole.rewards, whole.mask)
    total = int(right.sum())
    halves = [replace(whole, mask=whole.mask & (whole.group_ids < 4)),
              replace(whole, mask=whole.mask & (whole.group_ids >= 4))]  # fmt: skip
    parts = [positive_nll(half, total=total).per_token.sum() for half in halves]
    assert sum(parts).item() == pytest.approx(-whole.logprobs[right].mean().item())


def test_likelihood_of_positives_counts_its_tokens_and_knows_its_threshold():
    inputs = random_sequences(0)
    assert positive_nll(inputs, total=5).stats["positive"].item() == int(
        positive_tokens(inputs.rewards, inputs.mask).sum()
    )
    assert positive_nll(inputs, total=5, threshold=1.0).per_token.abs().sum().item() == 0.0


def test_no_positives_at_all_give_zero_with_a_graph():
    inputs = random_sequences(0)
    found = positive_nll(inputs, total=0, threshold=9.0).per_token.sum()
    found.backward()
    assert (found.item(), inputs.logprobs.grad.abs().sum().item()) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda row: positive_nll(replace(row, rewards=None), total=1), "needs rewards"),
        (lambda row: entropy_bonus(replace(row, entropies=None)), "needs entropies"),
        (
            lambda row: entropy_bonus(replace(row, entropies=row.entropies.detach())),
            "needs entropies with a gradient; found detached ones",
        ),
    ],
)
def test_what_is_missing_is_named(call, message):
    with pytest.raises(InputError, match=message):
        call(random_sequences(0))


def test_the_entropy_coefficient_rises_up_to_the_target_and_never_falls_below_zero():
    coefficients = [0.0]
    for entropy in (0.1, 0.2, 0.15, 0.3, 0.3, 0.1, 0.3, 0.3, 0.3):
        after = adapted_entropy_coefficient(coefficients[-1], entropy, target=0.2, step=0.005)
        coefficients.append(after)
    expected = [0, 0.005, 0.01, 0.015, 0.01, 0.005, 0.01, 0.005, 0, 0]
    assert coefficients == pytest.approx(expected)

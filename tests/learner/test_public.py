"""The public names of the package, and the first parameters of its functions."""

import inspect

import pytest

import learner


def test_the_public_names_are_these():
    assert learner.__all__ == [
        "Advantages",
        "Correction",
        "LossInputs",
        "TokenLoss",
        "advantage",
        "balance",
        "compute_advantages",
        "effective_sample_size",
        "gae",
        "importance_weights",
        "kl_penalty",
        "pack",
        "policy_loss",
        "policy_loss_function",
        "token_weights",
        "value_loss",
    ]
    assert learner.__all__ == sorted(learner.__all__)


@pytest.mark.parametrize("name", learner.__all__)
def test_every_public_name_resolves(name):
    assert getattr(learner, name).__name__ == name
    assert name in dir(learner)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("compute_advantages", "name rewards group_ids"),
        ("policy_loss", "name inputs"),
        ("importance_weights", "name inputs"),
        ("kl_penalty", "estimator logprobs reference_logprobs"),
        ("gae", "rewards values mask sequence_ids gamma lam bootstrap"),
        ("value_loss", "values old_values returns clip"),
        ("token_weights", "mode mask sequence_ids group_ids max_length"),
        ("effective_sample_size", "log_ratios mask"),
        ("pack", "lengths capacity"),
        ("balance", "lengths ranks"),
    ],
)
def test_the_public_functions_begin_with_these_parameters(name, parameters):
    expected = parameters.split()
    assert list(inspect.signature(getattr(learner, name)).parameters)[: len(expected)] == expected


def test_other_names_are_refused():
    with pytest.raises(AttributeError, match="has no attribute 'packs'"):
        _ = learner.packs

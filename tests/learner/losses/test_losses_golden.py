"""Losses beyond PPO and CISPO: values and gradients by hand, what they count, what they refuse."""

import math
from dataclasses import replace

import pytest
import torch

from headway.errors import InputError
from learner.config.traits import LOSSES, LossTraits
from learner.losses import LossInputs, TokenLoss, policy_loss
from learner.losses.policy_loss import policy_loss_function


def row(sequences, **changes):
    """Sequences of (ratios, advantage): log-probs log(ratio) over a behaviour log-prob of 0."""
    ratios = torch.tensor([r for own, _ in sequences for r in own], dtype=torch.float64)
    names = [i for i, (own, _) in enumerate(sequences) for _ in own]
    return LossInputs(
        **{
            "logprobs": ratios.log().requires_grad_(),
            "behavior_logprobs": torch.zeros_like(ratios),
            "advantages": torch.tensor([a for own, a in sequences for _ in own]).double(),
            "mask": torch.ones(len(ratios), dtype=torch.bool),
            "sequence_ids": torch.tensor(names),
            "group_ids": torch.tensor(names) // 2,
            **changes,
        }
    )


def values_and_gradients(name, inputs, **options):
    loss = policy_loss(name, inputs, **options).per_token
    (gradient,) = torch.autograd.grad(loss.sum(), inputs.logprobs, retain_graph=True)
    return loss.tolist(), gradient.tolist()


def counts(name, inputs, **options):
    return {k: int(v) for k, v in policy_loss(name, inputs, **options).stats.items()}


@pytest.mark.parametrize(
    ("ratio", "value", "slope"), [(0.5, 1.5102, 0.940), (1.0, 2.0, 1.0), (3.0, 3.5232, 0.420)]
)
def test_sapo_has_its_published_values_for_positives(ratio, value, slope):
    (found,), (gradient,) = values_and_gradients("sapo", row([([ratio], 1.0)]))
    assert -found == pytest.approx(value, abs=5e-5)
    assert -gradient / ratio == pytest.approx(slope, abs=5e-4)


@pytest.mark.parametrize(("ratio", "value", "slope"), [(1.0, 1.9048, 1.0), (3.0, None, 0.3888)])
def test_sapo_has_its_published_values_for_negatives(ratio, value, slope):
    (found,), (gradient,) = values_and_gradients("sapo", row([([ratio], -1.0)]))
    assert value is None or found == pytest.approx(value, abs=5e-5)
    assert gradient / ratio == pytest.approx(slope, abs=5e-5)


def test_sapo_counts_what_it_damps_by_half():
    # 4p(1 − p) < 1/2 where |r − 1| > ln(3 + 2√2) = 1.763 at τ = 1.
    assert counts("sapo", row([([2.7, 2.8], 1.0)]))["damped"] == 1


def test_gspo_clips_whole_sequences_by_their_geometric_mean():
    # exp(mean log) of (2, 0.5) is 1; of (1.5, 1.5) it is 1.5, above 1.4.
    inputs = row([([2.0, 0.5], 1.0), ([1.5, 1.5], 1.0)])
    found, gradient = values_and_gradients("gspo", inputs, clip_low=0.4, clip_high=0.4)
    assert found == pytest.approx([-1, -1, -1.4, -1.4])
    assert gradient == pytest.approx([-1, -1, 0, 0])
    assert counts("gspo", inputs, clip_low=0.4, clip_high=0.4) == {
        "clip_low": 0,
        "clip_high": 2,
        "ratio_bounded": 0,
    }


def test_gspo_token_takes_advantages_that_differ_within_a_sequence():
    advantages = torch.tensor([1.0, -2.0]).double()
    inputs = row([([1.5, 1.5], 1.0)], advantages=advantages)
    found = values_and_gradients("gspo_token", inputs, clip_low=0.4, clip_high=0.4)
    assert found == (pytest.approx([-1.4, 3.0]), pytest.approx([0.0, 3.0]))


def test_topr_tapers_negatives_by_the_product_and_leaves_positives_alone():
    inputs = row([([3.0, 3.0], 1.0), ([0.5, 0.5], -1.0), ([2.0, 2.0], -1.0)])
    _, gradient = values_and_gradients("topr", inputs)
    assert gradient == pytest.approx([-1, -1, 0.25, 0.25, 1, 1])
    assert counts("topr", inputs) == {"tapered": 2, "capped": 2, "ratio_bounded": 0}


def test_raft_keeps_what_is_better_than_its_baseline_at_weight_one():
    inputs = row([([3.0], 2.0), ([0.5], 0.1), ([1.0], 0.0), ([1.0], -1.0)])
    _, gradient = values_and_gradients("raft", inputs)
    assert gradient == [-1.0, -1.0, 0.0, 0.0]
    assert counts("raft", inputs) == {"kept": 2}


def test_raft_keeps_the_best_of_a_group_and_shares_a_tie():
    groups = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])
    sequences = [([1.0, 1.0], 2.0), ([1.0], 0.5), ([1.0, 1.0], 1.0), ([1.0], 1.0)]
    inputs = row([*sequences, ([1.0], 0.0), ([1.0], -1.0)], group_ids=groups)
    _, gradient = values_and_gradients("raft", inputs, keep="best")
    assert gradient == [-1.0, -1.0, 0.0, -0.5, -0.5, -0.5, 0.0, 0.0]


def test_decoupled_ppo_weighs_by_the_proximal_policy_and_clips_about_it():
    proximal = torch.tensor([2.0, 8.0]).double().log()
    inputs = row([([2.2, 16.0], 1.0)], proximal_logprobs=proximal)
    found, gradient = values_and_gradients("decoupled_ppo", inputs)
    assert found == pytest.approx([-2 * 1.1, -5 * 1.2])  # w = 2 and 8, capped at 5; r = 1.1 and 2
    assert gradient == pytest.approx([-2.2, 0.0])
    assert counts("decoupled_ppo", inputs) == {
        "clip_low": 0,
        "clip_high": 1,
        "ratio_bounded": 0,
        "weight_capped": 1,
    }


def pair(first, second, advantages=(1.0, -1.0), **changes):
    """Two sequences, with a reference log-prob of 0."""
    inputs = row([(first, advantages[0]), (second, advantages[1])], **changes)
    return replace(inputs, reference_logprobs=torch.zeros_like(inputs.behavior_logprobs))


def test_dpo_prefers_the_rollout_with_the_positive_advantage():
    swapped = pair([2.0, 3.0], [2.0], advantages=(-0.5, 2.0))
    z = math.log(2) - math.log(6)
    found, _ = values_and_gradients("dpo", swapped, beta=0.5)
    assert found == pytest.approx([math.log1p(math.exp(-0.5 * z))] * 3)
    assert counts("dpo", swapped)["misordered"] == 3


def test_a_tie_or_half_a_pair_is_left_out_and_counted():
    groups = torch.tensor([0, 0, 1, 2, 2])
    sequences = [([1.0], 0.0), ([1.0], 0.0), ([1.0], 1.0), ([1.0], 1.0), ([1.0], -1.0)]
    inputs = row(sequences, group_ids=groups, reference_logprobs=torch.zeros(5).double())
    found, gradient = values_and_gradients("dpo", inputs)
    assert (found[:3], gradient[:3]) == ([0.0] * 3, [0.0] * 3)
    assert found[3:] == pytest.approx([math.log(2)] * 2)
    assert counts("dpo", inputs) == {"unpaired": 3, "misordered": 0, "reference_not_finite": 0}


def test_dpo_is_finite_for_pairs_that_are_far_apart():
    far = torch.tensor([-4000.0, 4000.0]).double().requires_grad_()
    found, gradient = values_and_gradients("dpo", replace(pair([1.0], [1.0]), logprobs=far))
    assert (found, gradient) == (pytest.approx([800.0] * 2), pytest.approx([-0.2, 0.2]))


WITHOUT_VERSIONS = "decoupled_ppo with proximal = 'loglinear' needs versions"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dapo", {"clip_low": -0.1}, "found -0.1 and 0.28"),
        ("gspo", {"clip_high": -1.0}, "found 0.0003 and -1.0"),
        ("sapo", {"tau_negative": 0.0}, "tau_negative = 0.0 of 'sapo': .* greater than 0"),
        ("topr", {"level": "turn"}, "level = 'turn' of 'topr': .* 'sequence' or 'token'"),
        ("kimi", {"variant": "k3"}, "= 'k3' of 'kimi': .* 'k1.5', 'k2' or 'token_sq'"),
        ("kimi", {"tau": -1.0}, "tau = -1.0 of 'kimi': .* greater than or equal to 0"),
        ("raft", {"keep": "worst"}, "= 'worst' of 'raft': .* 'positive' or 'best'"),
        ("decoupled_ppo", {}, "proximal = 'recompute' needs proximal_logprobs"),
        ("decoupled_ppo", {"proximal": "loglinear"}, WITHOUT_VERSIONS),
        ("decoupled_ppo", {"proximal": "old"}, "be 'recompute', 'detach', 'loglinear' or 'linear'"),
        ("decoupled_ppo", {"cap": 0.0}, "cap = 0.0 of 'decoupled_ppo': .* greater than 0"),
        ("decoupled_ppo", {"fresh": "new"}, "fresh = 'new' of .* 'current' or 'behavior'"),
        ("dpo", {}, "needs reference_logprobs"),
        ("dpo", {"beta": 0.0}, "beta = 0.0 of 'dpo': .* greater than 0"),
        ("dpo", {"label_smoothing": 0.5}, "label_smoothing = 0.5 of .* less than 0.5"),
        ("dpo", {"variant": "hinge"}, "variant = 'hinge' of .* 'sigmoid' or 'ipo'"),
    ],
)
def test_what_cannot_be_computed_is_refused(name, options, message):
    with pytest.raises(InputError, match=message):
        policy_loss(name, row([([1.0], 1.0)]), **options)


def test_versions_without_the_version_being_trained_are_refused():
    inputs = row([([1.0], 1.0)], versions=torch.tensor([3]))
    with pytest.raises(InputError, match="needs version,"):
        policy_loss("decoupled_ppo", inputs, proximal="linear")


def test_a_group_of_more_than_a_pair_is_refused():
    inputs = row([([1.0], 1.0)] * 3, group_ids=torch.zeros(3, dtype=torch.int64))
    inputs = replace(inputs, reference_logprobs=torch.zeros(3).double())
    with pytest.raises(InputError, match=r"a group of 3; use prompts.group_size = 2"):
        policy_loss("dpo", inputs)


def test_the_best_of_a_group_needs_groups():
    inputs = row([([1.0], 1.0)], group_ids=None)
    with pytest.raises(InputError, match='raft with keep = "best" needs group_ids'):
        policy_loss("raft", inputs, keep="best")


def test_a_loss_of_the_users_needs_to_say_only_whether_it_owns_a_ratio():
    @policy_loss_function("pushes_for_the_test", owns_is=False)
    def push(inputs):
        return TokenLoss(-inputs.current, {})

    try:
        assert push.traits == LossTraits(owns_is=False)
        assert push.traits.under({"any": 1}) == push.traits
    finally:
        LOSSES.forget(["pushes_for_the_test"])

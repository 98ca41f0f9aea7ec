"""Policy losses beside their formulas: published values, what they count, what they refuse."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from packed_sequences import one_row, sequences_of

from headway.errors import InputError
from learner import losses
from learner.config.traits import CORRECTIONS, ESTIMATORS, LOSSES, LossTraits
from learner.losses import TokenLoss, policy_loss
from learner.losses.kl import FORMS
from learner.losses.policy_loss import policy_loss_function


def values_and_gradients(name, inputs, **options):
    loss = policy_loss(name, inputs, **options).per_token
    (gradient,) = torch.autograd.grad(loss.sum(), inputs.logprobs, retain_graph=True)
    return loss.tolist(), gradient.tolist()


@pytest.mark.parametrize(
    ("name", "ratio", "advantage", "options", "value", "slope"),
    [
        ("ppo", 1.5, 1.0, {}, -1.2, 0.0),
        ("ppo", 0.5, 1.0, {}, -0.5, -1.0),
        ("ppo", 0.5, -1.0, {}, 0.8, 0.0),
        ("ppo", 5.0, -1.0, {}, 5.0, 1.0),
        ("ppo", 5.0, -1.0, {"dual_clip": 3.0}, 3.0, 0.0),
        ("ppo", 5.0, 1.0, {"dual_clip": 3.0}, -1.2, 0.0),
        ("ppo", 1.25, 1.0, {"clip_high": 0.28}, -1.25, -1.0),
        ("sapo", 0.5, 1.0, {}, -1.5102, -0.940),
        ("sapo", 1.0, 1.0, {}, -2.0, -1.0),
        ("sapo", 3.0, 1.0, {}, -3.5232, -0.420),
        ("sapo", 1.0, -1.0, {}, 1.9048, 1.0),
        ("sapo", 3.0, -1.0, {}, None, 0.3888),
    ],
)
def test_a_token_has_the_published_value_and_derivative_by_its_ratio(
    name, ratio, advantage, options, value, slope
):
    inputs = sequences_of([([ratio], advantage)])
    (found,), (gradient,) = values_and_gradients(name, inputs, **options)
    assert value is None or found == pytest.approx(value, abs=5e-5)
    assert gradient / ratio == pytest.approx(slope, abs=5e-4)


TIED = [([1.0, 1.0], 2.0), ([1.0], 0.5), ([1.0, 1.0], 1.0), ([1.0], 1.0), ([1.0], 0.0)]
SIDES = [([0.5], -1.0), ([1.5], 1.0), ([0.5], 1.0), ([1.5], -1.0), ([4.0], -1.0)]
PROXIMAL = torch.tensor([2.0, 8.0]).double().log()
NONE = torch.zeros(5).double()


@pytest.mark.parametrize(
    ("name", "inputs", "options", "counts"),
    [
        (
            "ppo",
            sequences_of(SIDES),
            {"dual_clip": 3.0},
            {"clip_low": 1, "clip_high": 1, "dual_clip": 1, "ratio_bounded": 0},
        ),
        ("cispo", sequences_of([([6.0], 1.0), ([6.0], -1.0)]), {}, {"capped": 2}),
        ("cispo", sequences_of([([0.1], 1.0)]), {"cap_low": 0.5}, {"capped": 1}),
        # 4p(1 − p) < 1/2 where |r − 1| > ln(3 + 2√2) = 1.763 at τ = 1.
        ("sapo", sequences_of([([2.7, 2.8], 1.0)]), {}, {"damped": 1}),
        # exp(mean log) of (2, 0.5) is 1; of (1.5, 1.5) it is 1.5, above 1.4.
        (
            "gspo",
            sequences_of([([2.0, 0.5], 1.0), ([1.5, 1.5], 1.0)]),
            {"clip_low": 0.4, "clip_high": 0.4},
            {"clip_low": 0, "clip_high": 2, "ratio_bounded": 0},
        ),
        (
            "topr",
            sequences_of([([3.0, 3.0], 1.0), ([0.5, 0.5], -1.0), ([2.0, 2.0], -1.0)]),
            {},
            {"tapered": 2, "capped": 2, "ratio_bounded": 0},
        ),
        ("raft", sequences_of([([3.0], 2.0), ([0.5], 0.1), ([1.0], 0.0)]), {}, {"kept": 2}),
        (
            "decoupled_ppo",  # w = 2 and 8, capped at 5; r = 1.1 and 2
            sequences_of([([2.2, 16.0], 1.0)], proximal_logprobs=PROXIMAL),
            {},
            {"clip_low": 0, "clip_high": 1, "ratio_bounded": 0, "weight_capped": 1},
        ),
    ],
    ids=str,
)
def test_tokens_are_counted_by_what_happens_to_them(name, inputs, options, counts):
    found = policy_loss(name, inputs, **options).stats
    assert {key: int(found[key]) for key in counts} == counts


def test_what_is_masked_out_is_not_counted():
    inputs = replace(sequences_of([([9.0], 1.0)]), mask=torch.tensor([False]))
    assert {int(count) for count in policy_loss("ppo", inputs, dual_clip=3.0).stats.values()} == {0}


def test_log_ratios_are_bounded_before_exp():
    inputs = one_row(torch.tensor([0.0, -300.0]), behavior_logprobs=torch.tensor([-300.0, 0.0]))
    assert inputs.log_ratio.tolist() == [20.0, -20.0]


def test_half_precision_ratios_are_formed_in_float32():
    assert one_row(torch.tensor([-1.0, -2.0]).bfloat16()).log_ratio.dtype == torch.float32


def test_gspo_token_takes_advantages_that_differ_within_a_sequence():
    inputs = sequences_of([([1.5, 1.5], 1.0)], advantages=torch.tensor([1.0, -2.0]).double())
    found = values_and_gradients("gspo_token", inputs, clip_low=0.4, clip_high=0.4)
    assert found == (pytest.approx([-1.4, 3.0]), pytest.approx([0.0, 3.0]))


def test_raft_keeps_the_best_of_a_group_and_shares_a_tie():
    groups = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])
    inputs = sequences_of([*TIED, ([1.0], -1.0)], group_ids=groups)
    _, gradient = values_and_gradients("raft", inputs, keep="best")
    assert gradient == [-1.0, -1.0, 0.0, -0.5, -0.5, -0.5, 0.0, 0.0]


def pair(first, second, advantages=(1.0, -1.0), **changes):
    """Two sequences, with a reference log-prob of 0."""
    inputs = sequences_of([(first, advantages[0]), (second, advantages[1])], **changes)
    return replace(inputs, reference_logprobs=torch.zeros_like(inputs.behavior_logprobs))


def test_dpo_prefers_the_rollout_with_the_positive_advantage():
    swapped = pair([2.0, 3.0], [2.0], advantages=(-0.5, 2.0))
    z = math.log(2) - math.log(6)
    found, _ = values_and_gradients("dpo", swapped, beta=0.5)
    assert found == pytest.approx([math.log1p(math.exp(-0.5 * z))] * 3)
    assert policy_loss("dpo", swapped, beta=0.5).stats["misordered"] == 3


def test_a_tie_or_half_a_pair_is_left_out_and_counted():
    groups = torch.tensor([0, 0, 1, 2, 2])
    sequences = [([1.0], 0.0), ([1.0], 0.0), ([1.0], 1.0), ([1.0], 1.0), ([1.0], -1.0)]
    inputs = sequences_of(sequences, group_ids=groups, reference_logprobs=NONE)
    found, gradient = values_and_gradients("dpo", inputs)
    assert (found[:3], gradient[:3]) == ([0.0] * 3, [0.0] * 3)
    assert found[3:] == pytest.approx([math.log(2)] * 2)
    stats = {name: int(count) for name, count in policy_loss("dpo", inputs).stats.items()}
    assert stats == {"unpaired": 3, "misordered": 0, "reference_not_finite": 0}


def test_dpo_is_finite_for_pairs_that_are_far_apart():
    far = torch.tensor([-4000.0, 4000.0]).double().requires_grad_()
    found, gradient = values_and_gradients("dpo", replace(pair([1.0], [1.0]), logprobs=far))
    assert (found, gradient) == (pytest.approx([800.0] * 2), pytest.approx([-0.2, 0.2]))


ONE = sequences_of([([1.0], 1.0)])
OLD = sequences_of([([1.0], 1.0)], versions=torch.tensor([3]))
THREE = sequences_of(
    [([1.0], 1.0)] * 3, group_ids=torch.zeros(3).long(), reference_logprobs=torch.zeros(3).double()
)


@pytest.mark.parametrize(
    ("name", "inputs", "options", "message"),
    [
        ("ppo", ONE, {"dual_clip": 1.1}, "above 1 \\+ clip_high = 1.2, found 1.1"),
        ("ppo", ONE, {"clip_low": 1.5}, "found 1.5 and 0.2"),
        ("dapo", ONE, {"clip_low": -0.1}, "found -0.1 and 0.28"),
        ("gspo", ONE, {"clip_high": -1.0}, "found 0.0003 and -1.0"),
        ("cispo", ONE, {"cap_low": 6.0}, "found 6.0 and 5.0"),
        ("cispo", ONE, {"cap": 6.0}, "no option cap; its options: cap_high, cap_low"),
        ("pop", ONE, {}, "did you mean 'ppo'"),
        ("sapo", ONE, {"tau_negative": 0.0}, "tau_negative = 0.0 of 'sapo': .* greater than 0"),
        ("topr", ONE, {"level": "turn"}, "level = 'turn' of 'topr': .* 'sequence' or 'token'"),
        ("kimi", ONE, {"variant": "k3"}, "= 'k3' of 'kimi': .* 'k1.5', 'k2' or 'token_sq'"),
        ("kimi", ONE, {"tau": -1.0}, "tau = -1.0 of 'kimi': .* greater than or equal to 0"),
        ("raft", ONE, {"keep": "worst"}, "= 'worst' of 'raft': .* 'positive' or 'best'"),
        ("raft", replace(ONE, group_ids=None), {"keep": "best"}, '"best" needs group_ids'),
        ("decoupled_ppo", ONE, {}, "proximal = 'recompute' needs proximal_logprobs"),
        ("decoupled_ppo", ONE, {"proximal": "loglinear"}, "= 'loglinear' needs versions"),
        ("decoupled_ppo", OLD, {"proximal": "linear"}, "needs version,"),
        ("decoupled_ppo", ONE, {"proximal": "old"}, "be 'recompute', 'detach', 'loglinear' or 'l"),
        ("decoupled_ppo", ONE, {"cap": 0.0}, "cap = 0.0 of 'decoupled_ppo': .* greater than 0"),
        ("decoupled_ppo", ONE, {"fresh": "new"}, "fresh = 'new' of .* 'current' or 'behavior'"),
        ("dpo", ONE, {}, "needs reference_logprobs"),
        ("dpo", ONE, {"beta": 0.0}, "beta = 0.0 of 'dpo': .* greater than 0"),
        ("dpo", ONE, {"label_smoothing": 0.5}, "label_smoothing = 0.5 of .* less than 0.5"),
        ("dpo", ONE, {"variant": "hinge"}, "variant = 'hinge' of .* 'sigmoid' or 'ipo'"),
        ("dpo", THREE, {}, "a group of 3; use prompts.group_size = 2"),
    ],
)
def test_what_cannot_be_computed_is_refused(name, inputs, options, message):
    with pytest.raises(InputError, match=message):
        policy_loss(name, inputs, **options)


def test_tensors_of_different_lengths_are_refused_by_name():
    with pytest.raises(InputError, match=r"advantages must be \[N\] like logprobs \(1,\)"):
        one_row(torch.zeros(1), advantages=torch.zeros(2))


def test_a_loss_of_the_users_needs_to_say_only_whether_it_owns_a_ratio():
    @policy_loss_function("pushes_for_the_test", owns_is=False)
    def push(inputs):
        return TokenLoss(-inputs.current, {})

    try:
        assert push.traits == LossTraits(owns_is=False)
        assert push.traits.under({"any": 1}) == push.traits
    finally:
        LOSSES.forget(["pushes_for_the_test"])


def test_the_page_has_every_advantage_loss_correction_and_form_of_the_kl_term():
    page = (Path(losses.__file__).parent.parent / "docs" / "objectives.md").read_text()
    names = {*ESTIMATORS, *LOSSES, *CORRECTIONS, *FORMS}
    assert {name for name in names if f"`{name}`" not in page} == set()

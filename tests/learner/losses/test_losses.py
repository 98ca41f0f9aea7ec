"""Policy losses: golden values and gradients, on-policy agreement, masking."""

import math
from pathlib import Path

import pytest
import torch

from headway.errors import InputError
from learner import losses
from learner.config.traits import CORRECTIONS, ESTIMATORS, LOSSES
from learner.losses import LossInputs, policy_loss
from learner.losses.kl import FORMS


def one_token(ratio, advantage, **changes):
    """Return a token with log-prob log(ratio) over a behaviour log-prob of 0."""
    fields = {
        "logprobs": torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True),
        "behavior_logprobs": torch.zeros(1, dtype=torch.float64),
        "advantages": torch.tensor([advantage], dtype=torch.float64),
        "mask": torch.tensor([True]),
        "sequence_ids": torch.tensor([0]),
    }
    return LossInputs(**{**fields, **changes})


def row(logprobs, behavior, advantages, mask, **changes):
    return LossInputs(
        logprobs=logprobs,
        behavior_logprobs=torch.as_tensor(behavior),
        advantages=torch.as_tensor(advantages),
        mask=torch.as_tensor(mask),
        sequence_ids=torch.zeros(len(logprobs), dtype=torch.int64),
        **changes,
    )


def value_and_slope(name, inputs, **options):
    """ℓ and dℓ/dr = dℓ/dlogp / r of a single token."""
    loss = policy_loss(name, inputs, **options)
    (gradient,) = torch.autograd.grad(loss.per_token.sum(), inputs.logprobs)
    return loss.per_token.item(), (gradient / inputs.logprobs.exp()).item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "options", "value", "slope"),
    [
        (1.5, 1.0, {}, -1.2, 0.0),
        (0.5, 1.0, {}, -0.5, -1.0),
        (0.5, -1.0, {}, 0.8, 0.0),
        (5.0, -1.0, {}, 5.0, 1.0),
        (5.0, -1.0, {"dual_clip": 3.0}, 3.0, 0.0),
        (5.0, 1.0, {"dual_clip": 3.0}, -1.2, 0.0),
        (1.25, 1.0, {"clip_high": 0.28}, -1.25, -1.0),
    ],
)
@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_ppo_has_the_published_values_and_gradients(name, ratio, advantage, options, value, slope):
    found = value_and_slope(name, one_token(ratio, advantage), **options)
    assert found == pytest.approx((value, slope), abs=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "options"),
    [(6.0, 1.0, {}), (6.0, -1.0, {}), (0.1, 1.0, {"cap_low": 0.5})],
)
def test_cispo_counts_what_it_caps_whatever_the_sign(ratio, advantage, options):
    loss = policy_loss("cispo", one_token(ratio, advantage), **options)
    assert loss.stats["capped"].item() == 1


def test_log_ratios_are_bounded_before_exp():
    inputs = row(torch.tensor([0.0, -300.0]), [-300.0, 0.0], [1.0, 1.0], [True, True])
    assert inputs.log_ratio.tolist() == [20.0, -20.0]


def test_half_precision_ratios_are_formed_in_float32():
    inputs = row(torch.tensor([-1.0, -2.0]).bfloat16(), [-1.0, -2.0], [1.0, 1.0], [True, True])
    assert inputs.log_ratio.dtype == torch.float32


def test_clip_counts_tell_the_sides_apart():
    logprobs = torch.log(torch.tensor([0.5, 1.5, 0.5, 1.5, 4.0, 9.0]))
    inputs = row(
        logprobs,
        [0.0] * 6,
        [-1.0, 1.0, 1.0, -1.0, -1.0, 1.0],
        [True, True, True, True, True, False],
    )
    stats = policy_loss("ppo", inputs, dual_clip=3.0).stats
    assert {name: int(count) for name, count in stats.items()} == {
        "clip_low": 1,
        "clip_high": 1,
        "dual_clip": 1,
        "ratio_bounded": 0,
    }


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ppo", {"dual_clip": 1.1}, "above 1 \\+ clip_high = 1.2, found 1.1"),
        ("ppo", {"clip_low": 1.5}, "found 1.5 and 0.2"),
        ("cispo", {"cap_low": 6.0}, "found 6.0 and 5.0"),
        ("cispo", {"cap": 6.0}, "no option cap; its options: cap_high, cap_low"),
        ("pop", {}, "did you mean 'ppo'"),
    ],
)
def test_what_contradicts_itself_is_refused(name, options, message):
    with pytest.raises(InputError, match=message):
        policy_loss(name, one_token(1.0, 1.0), **options)


def test_tensors_of_different_lengths_are_refused_by_name():
    with pytest.raises(InputError, match=r"advantages must be \[N\] like logprobs \(1,\)"):
        one_token(1.0, 1.0, advantages=torch.zeros(2))


def test_the_page_has_every_advantage_loss_correction_and_form_of_the_kl_term():
    page = (Path(losses.__file__).parent.parent / "docs" / "objectives.md").read_text()
    names = {*ESTIMATORS, *LOSSES, *CORRECTIONS, *FORMS}
    assert {name for name in names if f"`{name}`" not in page} == set()

"""Offline preferences: what is learned, and that cutting into rows changes nothing."""

import math
from dataclasses import replace

import pytest
import torch

from headway.errors import InputError
from learner.config.supervised import PreferConfig
from learner.losses.preferences import PREFERENCE_LOSSES
from learner.supervised.prefer import Preference, check_loss, train_preferences, unrelated_text
from learner.supervised.sft import Example
from tests.learner.bigram_engine import BigramEngine


def text(prompt, reply):
    return Example([*prompt, *reply], [False] * len(prompt) + [True] * len(reply))


PAIRS = [
    (text([2, 3], [4, 1]), text([2, 3], [5, 1])),
    (text([3], [4, 4, 1]), text([3], [5, 2, 5, 1])),
    (text([2, 2, 2], [4, 1]), text([2, 2, 2], [3, 1])),
]
JUDGED = [side for pair in PAIRS for side in pair]


def preferences_of(loss):
    if loss != "kto":
        return [Preference(pair) for pair in PAIRS]
    others = [unrelated_text(own, JUDGED[at - 2], 99) for at, own in enumerate(JUDGED)]
    return [
        Preference((own,), desirable=at % 2 == 0, unrelated=Preference((other,)))
        for at, (own, other) in enumerate(zip(JUDGED, others, strict=True))
    ]


def trained(loss, *, steps=20, **settings):
    engine = BigramEngine(rate=0.5)
    preferences = engine.reference_of(preferences_of(loss))
    engine.rows.clear()
    sizes = {"microbatch_tokens": 4096, "eval_every": 1, **settings}
    config = PreferConfig(pairs="x", loss=loss, steps=steps, **sizes)
    batches = iter([preferences] * steps)
    return engine, list(train_preferences(engine, batches, config, preferences))


def figures_of(report):
    return [report.loss, report.accuracy, *report.heldout, report.heldout_accuracy]


@pytest.mark.parametrize("loss", PREFERENCE_LOSSES)
def test_the_better_text_becomes_the_likelier_one(loss):
    _, reports = trained(loss)
    losses = [report.loss for report in reports]
    assert losses == sorted(losses, reverse=True)
    assert [report.heldout[1] for report in reports[:-1]] == pytest.approx(losses[1:], abs=1e-12)
    assert reports[-1].heldout[1] < losses[-1]
    assert reports[-1].accuracy == reports[-1].heldout_accuracy == 1.0


@pytest.mark.parametrize("loss", PREFERENCE_LOSSES)
@pytest.mark.parametrize("capacity", [16, 24])
def test_rows_do_not_change_the_result(loss, capacity):
    expected, reports = trained(loss, steps=3)
    engine, others = trained(loss, steps=3, microbatch_tokens=capacity)
    torch.testing.assert_close(engine.table, expected.table, rtol=1e-12, atol=1e-12)
    for other, report in zip(others, reports, strict=True):
        assert figures_of(other) == pytest.approx(figures_of(report), abs=1e-12)
    assert len(engine.rows) > len(expected.rows)


@pytest.mark.parametrize(("loss", "expected"), [("dpo", math.log(2)), ("ipo", 25.0), ("kto", 0.5)])
def test_the_policy_is_its_own_reference_at_first(loss, expected):
    _, [report] = trained(loss, steps=1)
    assert report.loss == pytest.approx(expected, abs=1e-12)
    assert report.accuracy == 0.0


@pytest.mark.parametrize(("shift", "kl"), [(0.25, 0.25), (-0.25, 0.0)])
def test_the_kl_term_is_the_mean_over_the_whole_batch_and_never_negative(shift, kl):
    """A policy that only got likelier on unrelated texts by κ in the mean has margins ∓κ."""
    engine = BigramEngine()
    preferences = engine.reference_of(preferences_of("kto"))
    offsets = (shift + 1, shift - 1, shift, shift, shift + 2, shift - 2)
    for at, (item, offset) in enumerate(zip(preferences, offsets, strict=True)):
        other = replace(item.unrelated, reference=(item.unrelated.reference[0] - offset,))
        preferences[at] = replace(item, unrelated=other)
    config = PreferConfig(pairs="x", loss="kto", steps=1, microbatch_tokens=16)
    [report] = train_preferences(engine, iter([preferences]), config)
    up, down = (1 / (1 + math.exp(sign * 0.1 * kl)) for sign in (-1, 1))
    assert report.loss == pytest.approx((up + down) / 2, abs=1e-12)
    assert report.accuracy == (0.5 if kl else 0.0)


def test_an_unrelated_text_is_cut_at_the_context():
    own, other = text([2, 3], [4, 1]), text([5], [5, 5, 5, 1])
    assert unrelated_text(own, other, 99) == text([2, 3], [5, 5, 5, 1])
    assert unrelated_text(own, other, 4) == text([2, 3], [5, 5])


@pytest.mark.parametrize(
    ("loss", "options", "problem"),
    [
        ("dpo", {"bta": 0.1}, "bta"),
        ("dpo", {"beta": 0}, "prefer.loss_options.beta = 0 of 'dpo': .* greater than 0"),
        ("ipo", {"label_smoothing": 0.1}, "label_smoothing"),
        ("kto", {"desirable_weight": -1.0}, "prefer.loss_options.desirable_weight"),
        ("kto", {"desirable": 1}, "desirable"),
        ("orpo", {"beta": "large"}, "prefer.loss_options.beta = 'large'"),
        ("simpo", {"gamma": float("inf")}, "prefer.loss_options.gamma"),
    ],
)
def test_options_that_a_loss_does_not_have_are_refused(loss, options, problem):
    with pytest.raises(InputError, match=problem):
        check_loss(PreferConfig(pairs="x", loss=loss, loss_options=options))

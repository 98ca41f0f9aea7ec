"""Importance weights: values, composition, what they must not touch."""

import math
from dataclasses import replace

import pytest
import torch
from packed_sequences import one_row, sequences_of

from headway.errors import InputError
from learner.config.traits import CORRECTIONS
from learner.corrections import importance_weights


def inputs(ratios, mask=None, proximal=None):
    logprobs = torch.tensor(ratios, dtype=torch.float64).log().requires_grad_()
    changes = {} if mask is None else {"mask": torch.tensor(mask)}
    if proximal is not None:
        changes["proximal_logprobs"] = torch.tensor(proximal).double().log()
    return one_row(logprobs, **changes)


def test_truncation_keeps_small_ratios_and_caps_large_ones():
    found = importance_weights("tis", inputs([0.5, 1.0, 2.0, 3.0]))
    torch.testing.assert_close(found.weights, torch.tensor([0.5, 1.0, 2.0, 2.0]).double())
    assert found.keep.all()
    assert found.stats["truncated"].item() == 1


def test_the_numerator_is_the_proximal_policy_where_there_is_one():
    found = importance_weights("tis", inputs([9.0], proximal=[1.5]))
    torch.testing.assert_close(found.weights, torch.tensor([1.5]).double())


def test_masked_tokens_weigh_one_and_are_not_counted():
    found = importance_weights("tis", inputs([9.0, math.inf], mask=[False, False]))
    assert found.weights.tolist() == [1.0, 1.0]
    assert found.stats["truncated"].item() == 0


def test_no_corrections_at_all_count_every_token_once():
    assert importance_weights([], inputs([3.0])).weights.tolist() == [1.0]


# Bands: the ratio inside, nothing outside.


@pytest.mark.parametrize(
    ("name", "options", "weights"),
    [
        ("mis", {}, [0.2, 0.5, 1.0, 2.0, 0.0, 0.0]),
        ("mis", {"low": 0.5, "high": 5.0}, [0.0, 0.5, 1.0, 2.0, 5.0, 0.0]),
        ("icepop", {}, [0.0, 0.5, 1.0, 2.0, 5.0, 0.0]),
        ("icepop", {"low": 0.6, "high": 1.5}, [0.0, 0.0, 1.0, 0.0, 0.0, 0.0]),
    ],
)
def test_bands_reject_by_token_and_keep_the_ratio_elsewhere(name, options, weights):
    found = importance_weights(name, inputs([0.2, 0.5, 1.0, 2.0, 5.0, 6.0]), **options)
    assert found.weights.tolist() == pytest.approx(weights)
    assert found.keep.tolist() == [weight > 0 for weight in weights]
    stat = "masked" if name == "mis" else "popped"
    assert found.stats[stat].item() == weights.count(0.0)


def sequences(*ratios, **changes):
    """Return a row of several sequences of ratios."""
    return sequences_of([(own, 1.0) for own in ratios], **changes)


def test_sequence_truncation_caps_the_product_of_a_sequence():
    found = importance_weights("sequence_tis", sequences([2.0, 0.25], [3.0, 2.0], [1.5]))
    assert found.weights.tolist() == pytest.approx([0.5, 0.5, 2.0, 2.0, 1.5])
    assert found.keep.all()
    assert found.stats["sequence_truncated"].item() == 2


def test_sequence_masking_rejects_by_the_product_of_a_sequence():
    row = sequences([2.0, 0.25], [3.0, 2.0], [1.5])
    found = importance_weights("sequence_mis", row)
    assert found.weights.tolist() == pytest.approx([0.5, 0.5, 0.0, 0.0, 1.5])
    assert found.keep.tolist() == [True, True, False, False, True]
    assert found.stats["sequence_masked"].item() == 2
    both = importance_weights("sequence_mis", row, low=1.0)
    assert both.keep.tolist() == [False, False, False, False, True]


def test_geometric_masking_rejects_by_the_mean_log_ratio_and_weighs_by_one():
    row = sequences([1.3, 1 / 1.3], [1.01, 1.01], [0.9995])
    found = importance_weights("geometric_mis", row)
    assert found.weights.tolist() == [1.0] * 5
    assert found.keep.tolist() == [True, True, False, False, True]
    assert found.stats["geometric_rejected"].item() == 2


def test_masked_tokens_do_not_enter_the_ratio_of_their_sequence():
    row = replace(sequences([2.0, 9.0, 0.5]), mask=torch.tensor([True, False, True]))
    assert importance_weights("sequence_tis", row).weights.tolist() == pytest.approx([1.0] * 3)
    assert importance_weights("geometric_mis", row).keep.all()


# Rejection.


@pytest.mark.parametrize(
    ("options", "keep"),
    [
        ({"threshold": 0.2}, [True, True, True, False, True]),
        ({"threshold": 0.18}, [True, False, True, False, True]),
        ({"threshold": 0.2, "estimator": "k2"}, [True, False, True, False, True]),
        ({"threshold": 0.2, "level": "sequence_max"}, [True, True, False, False, False]),
        ({"threshold": 0.2, "level": "sequence"}, [True, True, False, False, False]),
        ({"threshold": 0.4, "level": "sequence"}, [True, True, True, True, True]),
    ],
)
def test_kl_masking_is_by_the_estimate_under_the_sampler(options, keep):
    # k3 = ρ − 1 − log ρ: of 2 it is 0.307, of 0.5 it is 0.193, of 3 it is 0.901.
    row = sequences([1.0, 0.5], [1.0, 3.0, 1.0])
    assert importance_weights("kl_mask", row, **options).keep.tolist() == keep


def test_a_veto_rejects_the_sequence_of_an_all_but_impossible_token():
    found = importance_weights("veto", sequences([1.0, 9e-5], [1.0, 2e-4]))
    assert found.keep.tolist() == [False, False, True, True]
    assert found.stats["vetoed"].item() == 2


def test_opsm_rejects_negatives_that_the_current_policy_has_left_behind():
    ratios = [0.5, 0.5], [0.5, 0.5], [0.7], [2.0]
    row = sequences(*ratios)
    row = replace(row, advantages=torch.tensor([-1.0, -1, 1, 1, -1, -1]).double())
    found = importance_weights("opsm", row)  # −log 0.5 = 0.69 > 0.5, −log 0.7 = 0.36
    assert found.keep.tolist() == [False, False, True, True, True, True]
    assert found.stats["opsm_rejected"].item() == 2
    about_the_sampler = replace(row, proximal_logprobs=row.behavior_logprobs)
    assert torch.equal(importance_weights("opsm", about_the_sampler).keep, found.keep)


# By lag.


def aged(ratios, lags, version=9):
    return replace(inputs(ratios), versions=version - torch.tensor(lags), version=version)


def test_caps_may_differ_by_lag_and_the_last_is_for_all_larger_ones():
    row = aged([9.0, 9.0, 9.0, 9.0, 1.1], [0, 1, 2, 7, 1])
    found = importance_weights("tis", row, lag_caps=[4.0, 2.0, 1.5])
    assert found.weights.tolist() == pytest.approx([4.0, 2.0, 1.5, 1.5, 1.1])
    assert found.stats["truncated"].item() == 4


def test_tokens_older_than_the_largest_lag_are_rejected():
    found = importance_weights("lag_mask", aged([2.0] * 4, [0, 1, 2, 3]), max_lag=1)
    assert found.keep.tolist() == [True, True, False, False]
    assert found.weights.tolist() == [1.0] * 4
    assert found.stats["too_old"].item() == 2


@pytest.mark.parametrize("missing", ["versions", "version"])
@pytest.mark.parametrize(
    ("name", "options"), [("tis", {"lag_caps": [2.0]}), ("lag_mask", {"max_lag": 1})]
)
def test_lags_need_versions(name, options, missing):
    row = replace(aged([1.0], [0]), **{missing: None})
    with pytest.raises(InputError, match=f"{name}.* needs {missing}"):
        importance_weights(name, row, **options)


# Composition.


def test_a_list_multiplies_weights_and_keeps_what_all_keep():
    row = sequences([1.5, 1.5], [1.01, 4.0])
    found = importance_weights(
        ["tis", "geometric_mis", "icepop"],
        row,
        cap=1.2,
        geometric_mis={"low": 1.2, "high": 1.6},
        icepop={"high": 3.0},
    )
    assert found.weights.tolist() == pytest.approx([1.8, 1.8, 1.01 * 1.01, 0.0])
    assert found.keep.tolist() == [True, True, False, False]
    assert {"truncated", "geometric_rejected", "popped"} <= set(found.stats)
    assert found.stats["truncated"].item() == 3


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
def test_what_only_rejects_says_so_and_weighs_by_one(name):
    settings = {"kl_mask": {"threshold": 0.5}, "lag_mask": {"max_lag": 1}}.get(name, {})
    row = aged([0.7, 1.2], [0, 1])
    weights = importance_weights(name, row, **settings).weights.tolist()
    assert CORRECTIONS[name].traits.weighs == (weights != [1.0, 1.0])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("tis", {"clip": 2.0}, "no option clip; its options: cap, lag_caps"),
        ("none", {"cap": 2.0}, "no option cap; its options: none"),
        ("tis", {"cap": 0.0}, "cap = 0.0 of 'tis': Input should be greater than 0"),
        ("tis", {"lag_caps": [2.0, -1.0]}, "lag_caps = .2.0, -1.0. of 'tis': .* greater than 0"),
        ("tis", {"lag_caps": []}, "lag_caps = .. of 'tis': .* at least 1 item"),
        ("tis", {"tis": {"clip": 1.0}}, "no option clip"),
        ("tis", {"tis": 2.0}, "= 2.0 must be a table of options of 'tis'"),
        ("mis", {"low": 3.0}, "mis needs 0 <= low < high, found 3.0 and 2.0"),
        ("icepop", {"low": -0.1}, "icepop needs 0 <= low < high, found -0.1 and 5.0"),
        ("sequence_tis", {"cap": -1.0}, "cap = -1.0 of 'sequence_tis': .* greater than 0"),
        ("sequence_mis", {"high": 0.0}, "found 0.0 and 0.0"),
        ("geometric_mis", {"low": 2.0}, "found 2.0 and 1.002"),
        ("kl_mask", {"threshold": 0.0}, "threshold = 0.0 of 'kl_mask': .* greater than 0"),
        ("kl_mask", {"threshold": 1.0, "level": "turn"}, "'token', 'sequence' or 'sequence_max'"),
        ("kl_mask", {"threshold": 1.0, "estimator": "k1"}, "estimator = 'k1' .* 'k2' or 'k3'"),
        ("veto", {"threshold": -1.0}, "threshold = -1.0 of 'veto': .* greater than 0"),
        ("opsm", {"threshold": -1.0}, "threshold = -1.0 of 'opsm': .* greater than or equal to 0"),
        ("lag_mask", {"max_lag": -1}, "max_lag = -1 of 'lag_mask': .* than or equal to 0"),
        ("tiss", {}, "did you mean 'tis'"),
    ],
)
def test_bad_settings_are_refused(name, options, message):
    with pytest.raises(InputError, match=message):
        importance_weights(name, inputs([1.0]), **options)

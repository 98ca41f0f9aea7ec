"""`headway bench plan`: rates from stored figures, by hand, and what it refuses."""

import pytest

from benchmarks.plan_check import ARM as NAMES
from benchmarks.plan_check import check_folder, check_gain, gain_rates
from deploy.config import load_recipe
from deploy.errors import InputError

LIMITS = {
    "actors": {
        "raw": {  # 2 ms a rollout and 0.1 ms a token
            "initial": {"samples_per_second": 1 / 0.004, "tokens_per_rollout": 20.0},
            "trained": {"samples_per_second": 1 / 0.006, "tokens_per_rollout": 40.0},
        }
    }
}
ARM = {
    "learner_step_seconds": 0.5,
    "learner_other_seconds": 0.02,
    "samples_per_second": 150.0,
    "learner_idle": 0.3,
    "lag_mean": 1.0,
    "raw": {"tokens_trained": [128 * 30] * 20},
}


def test_rates_of_stored_figures_are_a_time_for_a_rollout_and_one_for_a_token():
    rates = gain_rates(LIMITS, ARM, ARM, load_recipe("demo"))
    assert rates.engine.turnover_seconds == pytest.approx(0.002)
    assert rates.engine.rollout_step_seconds == pytest.approx(0.0001)
    assert (rates.learner.batch_seconds, rates.learner.publish_seconds) == (0.5, 0.02)
    assert len(rates.lengths) == 20 * 16
    assert rates.tokens_mean == pytest.approx(30, rel=0.1)


def test_every_bound_of_every_round_is_compared_and_arms_with_all_cores_are_not():
    round_ = {"arms": {"0": ARM, "2": ARM, "0, all cores": ARM}, "limits": LIMITS}
    document = {
        "recipe": "demo",
        "settings": [],
        "steps": 20,
        "reference_bound": 2,
        "rounds": [round_, round_],
    }
    checks = check_gain(document)
    assert [(each["round"], each["max_staleness"]) for each in checks] == [
        ("round1", 0),
        ("round1", 2),
        ("round2", 0),
        ("round2", 2),
    ]
    assert all(each["ratio"] == 150.0 / each["predicted"] for each in checks)
    assert checks[0]["predicted"] < checks[1]["predicted"]


def test_a_folder_without_arms_is_refused(tmp_path):
    with pytest.raises(InputError, match="has no runs round1-eta0 or eta0-seed0"):
        check_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("round2-eta8", ("round2", "8", None)),
        ("eta16-seed3", (None, "16", "seed3")),
        ("cispo-eta8-seed0", None),
        ("etainf-seed0", None),
    ],
)
def test_arms_of_both_benchmarks_are_known_by_their_names(name, found):
    match = NAMES.fullmatch(name)
    assert (match and match.group("round", "eta", "seed")) == found

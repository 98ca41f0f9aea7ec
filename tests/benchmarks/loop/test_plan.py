"""`headway bench plan`: rates from stored figures, by hand, and what it refuses."""

import json

import pytest

from benchmarks.loop.plan_check import (
    RUN_NAME,
    STUDY,
    check_folder,
    check_gain,
    gain_rates,
    stored_runs,
)
from deploy.config.loader import load_recipe
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


ROUND = {"arms": {"0": ARM, "2": ARM, "0, all cores": ARM}, "limits": LIMITS}
DOCUMENT = {
    "command": "async_gain.py",
    "commit": "a7bc25c",
    "recipe": "demo",
    "settings": [],
    "steps": 20,
    "reference_bound": 2,
    "rounds": [ROUND, ROUND],
}


def test_rates_of_stored_figures_are_a_time_for_a_rollout_and_one_for_a_token():
    rates = gain_rates(LIMITS, ARM, ARM, load_recipe("demo"))
    assert rates.engine.turnover_seconds == pytest.approx(0.002)
    assert rates.engine.rollout_step_seconds == pytest.approx(0.0001)
    assert (rates.learner.batch_seconds, rates.learner.publish_seconds) == (0.5, 0.02)
    assert len(rates.lengths) == 20 * 16
    assert rates.to_dict()["lengths"]["mean"] == pytest.approx(30, rel=0.1)


def test_every_bound_of_every_round_is_compared_and_runs_with_all_cores_are_not():
    checks = check_gain(stored_runs(DOCUMENT))
    assert [(check["round"], check["max_staleness"]) for check in checks] == [
        ("round1", 0),
        ("round1", 2),
        ("round2", 0),
        ("round2", 2),
    ]
    assert all(check["ratio"] == 150.0 / check["predicted"] for check in checks)
    assert checks[0]["predicted"] < checks[1]["predicted"]


def limits(initial, trained):
    """Of actors alone, each of samples/s and tokens a rollout."""
    names = ("samples_per_second", "tokens_per_rollout")
    both = {"initial": initial, "trained": trained}
    return {
        "actors": {
            "raw": {key: dict(zip(names, value, strict=True)) for key, value in both.items()}
        }
    }


def without(key):
    return {name: value for name, value in DOCUMENT.items() if name != key}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (None, "was not written by `headway bench async`: 'NoneType'"),
        ({}, "was not written by `headway bench async`: it has no 'command'"),
        (without("reference_bound"), "it has no 'reference_bound'"),
        (DOCUMENT | {"reference_bound": 8}, "it has no '8'"),
        (DOCUMENT | {"rounds": [{"arms": {"2": ARM}}]}, "it has no 'limits'"),
        (DOCUMENT | {"rounds": [ROUND | {"limits": limits((9, 30), (9, 30))}]}, "9.0 samples/s of"),
        (DOCUMENT | {"rounds": [ROUND | {"limits": limits((9, 30), (10, 40))}]}, "10.0 samples/s"),
        (DOCUMENT | {"rounds": [ROUND | {"limits": limits((9, 30), (5, 40))}]}, "5.0 samples/s of"),
    ],
    ids=[
        "nothing", "another file", "no reference", "no arm of the reference", "no limits",
        "the same length", "longer and yet faster", "slower by more than it is longer",
    ],
)  # fmt: skip
def test_a_file_without_rates_is_refused_before_a_folder_is_read(tmp_path, document, message):
    file = tmp_path / "gain.json"
    file.write_text(json.dumps(document))
    missing = tmp_path / "missing"
    options = STUDY.parse([str(missing), "--gain", str(file), "--out", str(tmp_path / "out.json")])
    with pytest.raises(InputError, match=f"--gain {file}.* {message}"):
        STUDY.run(options)


def test_a_folder_without_runs_is_refused(tmp_path):
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
def test_runs_of_both_benchmarks_are_recognised_by_their_names(name, found):
    match = RUN_NAME.fullmatch(name)
    assert (match and match.group("round", "eta", "seed")) == found

"""`headway bench staleness` and `versus-trl`: their figures, and the first from end to end."""

import argparse
import json

import pytest

from benchmarks import staleness_outcome, versus_trl
from benchmarks.checkpoint_scores import INITIAL, SCORES
from benchmarks.staleness import Arm, Study, make_study, read_arm, read_arms
from benchmarks.staleness_figures import (
    curve,
    interval,
    off_policyness,
    quantile,
    seconds_to,
    t_quantile,
)
from deploy.config import load_recipe
from deploy.errors import InputError
from deploy.run_directory import RunDirectory
from tests.deploy.conftest import RECIPE
from tests.deploy.leased import train_early


def row(version, **changes):
    """Statistics of a batch that took a second, after half a second of waiting."""
    return {
        "version": version,
        "wait_started_at": 100.0 + 1.5 * version,
        "step_finished_at": 101.5 + 1.5 * version,
        "tokens_trained": 10,
        "lag_histogram": {"0": 10},
        "ess": 1.0,
        "fractions": {"capped": 0.0, "not_finite": 0.5},
        "mismatch_fresh": 0.0,
        "tokens_fresh": 10,
        "mismatch_stale": None,
        "tokens_stale": 0,
        "mismatch_crossed": None,
        "tokens_crossed": 0,
        "kl_fresh": 0.0,
        "kl_stale": None,
        "kl_crossed": None,
        "kl": 0.0,
    } | changes


def test_lag_is_counted_over_the_tokens_of_all_batches_after_the_first():
    first = [row(version, lag_histogram={"9": 10}) for version in range(5)]
    stale = row(
        6,
        lag_histogram={"1": 9, "3": 1},
        ess=0.5,
        fractions={"capped": 0.25, "masked": 0.125, "not_finite": 0.0},
        mismatch_stale=0.2,
        tokens_stale=8,
        mismatch_crossed=0.1,
        tokens_crossed=2,
        kl_stale=0.03,
        kl_crossed=0.04,
        kl=0.02,
    )
    assert off_policyness([*first, row(5), stale]) == {
        "lag_mean": 12 / 20,
        "lag_p95": 1,
        "lag_max": 3,
        "ess": 0.75,
        "mismatch_fresh": 0.0,
        "mismatch_stale": 0.2,
        "mismatch_crossed": 0.1,
        "kl_fresh": 0.0,
        "kl_stale": 0.03,
        "kl_crossed": 0.04,
        "kl": 0.01,
        "clipped": 0.125,
    }


@pytest.mark.parametrize(("share", "value"), [(0.5, 1), (0.51, 2), (0.9, 2), (0.91, 7), (1.0, 7)])
def test_a_quantile_is_the_smallest_value_that_the_share_does_not_exceed(share, value):
    assert quantile({7: 1, 1: 5, 2: 4}, share) == value


def test_a_version_is_scored_at_the_end_of_the_step_that_made_it():
    rows = [row(version) for version in range(4)]
    assert curve(rows, {4: 0.9, 2: 0.5}) == [(3.0, 0.5), (6.0, 0.9)]


@pytest.mark.parametrize(
    ("target", "seconds"), [(0.3, 10.0), (0.5, 10.0), (0.6, 15.0), (0.7, 20.0), (0.95, None)]
)
def test_a_target_between_two_scores_is_reached_between_them(target, seconds):
    assert seconds_to([(10.0, 0.5), (20.0, 0.7), (30.0, 0.6)], target) == (
        None if seconds is None else pytest.approx(seconds)
    )


@pytest.mark.parametrize(
    ("probability", "freedom", "table"),
    [(0.975, 1, 12.706), (0.975, 4, 2.776), (0.95, 9, 1.833), (0.975, 120, 1.980)],
)
def test_quantiles_of_students_distribution_are_those_of_the_tables(probability, freedom, table):
    assert t_quantile(probability, freedom) == pytest.approx(table, abs=6e-4)


def test_the_interval_of_five_seeds_is_students():
    low, high = interval([-0.02, -0.01, 0.0, 0.01, 0.02])
    assert high == -low == pytest.approx(2.7764 * 0.0158114 / 5**0.5, rel=1e-4)


def test_ratios_and_differences_are_taken_within_a_seed():
    def arm(kind, name, seed, speed, score):
        return {
            "kind": kind,
            "name": name,
            "seed": seed,
            "samples_per_second": speed,
            "score": score,
        }

    arms = [
        arm("bound", "0", 0, 50.0, 0.90),
        arm("bound", "0", 1, 60.0, 0.80),
        arm("bound", "4", 0, 90.0, 0.91),
        arm("bound", "4", 1, 120.0, 0.83),
        arm("bound", "inf", 0, 100.0, 0.90),
        arm("bound", "inf", 1, 120.0, 0.80),
        arm("correction", "none", 0, 100.0, 0.50),
        arm("correction", "none", 1, 100.0, 0.60),
    ]
    predictions = [
        {"name": name, "seed": seed, "simulated": 100.0, "law": 200.0, "lag_mean": 1.0 + seed}
        for name in ("0", "4", "inf")
        for seed in (0, 1)
    ]
    found = staleness_outcome.conclude({"arms": arms, "predictions": predictions})
    assert found["of_predicted"] == {"0": 0.55, "4": 1.05, "inf": 1.1}
    assert found["of_law"]["4"] == 0.525
    assert found["of_unbounded"]["4"] == 0.95
    assert found["predicted_lag"]["4"] == 1.5
    assert found["score_difference"]["bound"]["4"]["each"] == pytest.approx([0.01, 0.03])
    assert found["score_difference"]["correction"]["none"]["mean"] == pytest.approx(-0.3)


def test_headway_stands_beside_the_best_of_trls_settings_at_each_figure():
    def arm(name, seed, speed, seconds):
        return {
            "name": name,
            "seed": seed,
            "samples_per_second": speed,
            "seconds_to_target": seconds,
            "tokens_per_rollout": 30.0,
            "score": 0.9,
            "seconds": 100.0,
        }

    arms = [
        arm("Headway", 0, 100.0, 10.0),
        arm("Headway", 1, 120.0, 10.0),
        arm("TRL 8", 0, 10.0, 15.0),
        arm("TRL 8", 1, 10.0, 15.0),
        arm("TRL 32", 0, 50.0, 40.0),
        arm("TRL 32", 1, 40.0, None),
    ]
    found = versus_trl.conclude(arms)
    assert found["throughput"] == {"best": "TRL 32", "ratio": 2.5}
    assert found["time"] == {"best": "TRL 8", "ratio": pytest.approx(2 / 3)}
    assert found["medians"]["TRL 32"]["seconds_to_target"] is None
    assert versus_trl.conclude([*arms[:2], *arms[4:]])["time"] == {"best": None, "ratio": None}


def test_a_recipe_whose_objective_trl_is_not_given_is_refused():
    versus_trl.check_alike(load_recipe("demo"))
    with pytest.raises(InputError, match=r"learner\.advantage = 'rloo'"):
        versus_trl.check_alike(load_recipe("demo", ['learner.advantage="rloo"']))


def trained_arm(folder, *, steps, **late):
    """An arm with a bound of 2, whose last three batches are trained after the last lease.

    Args:
        folder: For the arm.
        steps: Of it.
        late: What the statistics of these three have.
    """
    config = load_recipe(str(RECIPE), [f"deploy.runs_dir={folder}", "name=eta2-seed0"])
    directory = RunDirectory.of(config)
    directory.create(config, replace=False)
    fresh = {"lag_mean": 0.0, "max_lag": 0}
    rows = train_early(
        directory,
        steps=steps,
        staleness=2,
        row=lambda version: row(version, **(fresh if version < steps - 3 else late)),
    )
    (folder / INITIAL).write_text("0.25")
    (directory.path / SCORES).write_text(json.dumps({steps: 0.75}))
    study = Study(config, ("2",), (0,), (), stale=8, target=0.5, out=folder)
    return study, Arm("bound", "2", 0, config), rows


def test_figures_of_an_arm_are_of_the_batches_before_its_last_lease(tmp_path):
    late = {"lag_histogram": {"9": 10}, "lag_mean": 9.0, "max_lag": 9, "ess": 0.1}
    study, arm, rows = trained_arm(tmp_path, steps=14, **late)
    found = read_arm(study, arm)
    assert (found["first_version"], found["batches"]) == (5, 6)
    seconds = rows[10]["step_finished_at"] - rows[4]["step_finished_at"]
    tokens = sum(2 * (4 + version) for version in range(5, 11))
    assert found["samples_per_second"] == pytest.approx(2 * 6 / seconds)
    assert found["tokens_per_second"] == pytest.approx(tokens / seconds)
    assert found["tokens_per_rollout"] == tokens / (2 * 6)
    assert (found["lag_mean"], found["lag_p95"], found["ess"]) == (0.0, 0, 1.0)
    assert 0 <= found["actors_idle"] <= 1


def test_the_largest_lag_scores_and_seconds_of_an_arm_are_of_the_whole_run(tmp_path):
    study, arm, rows = trained_arm(tmp_path, steps=14, lag_mean=9.0, max_lag=9)
    found = read_arm(study, arm)
    assert (found["lag_max"], found["score"]) == (9, 0.75)
    assert found["seconds"] == rows[13]["step_finished_at"] - rows[0]["wait_started_at"]
    assert found["curve"] == [(0.0, 0.25), (found["seconds"], 0.75)]


def test_an_arm_that_leased_everything_too_early_is_left_out_with_the_reason(tmp_path):
    study, arm, _ = trained_arm(tmp_path, steps=12, lag_mean=0.0, max_lag=0)
    found, [failed] = read_arms(study, [arm])
    assert found == []
    assert (failed["kind"], failed["name"], failed["seed"]) == ("bound", "2", 0)
    assert "trained 12 batches since it was last started, 9 of them before" in failed["why"]


def test_steps_that_surely_leave_too_few_batches_before_the_last_lease_are_refused(tmp_path):
    given = {"recipe": "demo", "settings": [], "steps": 18, "score_every": 5, "problems": 100}
    given |= {"bounds": "0,2", "seeds": "0", "stale": 8, "target": 0.85, "out": tmp_path / "out"}
    with pytest.raises(InputError, match=r"--steps 18 .* at least 19: .* the last 9 of an arm"):
        make_study(argparse.Namespace(**given, corrections="cispo"))
    assert make_study(argparse.Namespace(**given, corrections="")).corrections == ()


@pytest.mark.ray
@pytest.mark.deepspeed
@pytest.mark.slow
@pytest.mark.timeout(560)
def test_a_study_is_trained_scored_and_gone_on_with(headway):
    recipe = headway.arguments("run")[2]
    out = headway.folder / "study"
    settings = ("--set", 'learner.cores="1"', "--set", "heldout.size=8")
    options = ("--steps", "14", "--seeds", "0", "--problems", "12", "--score-every", "7")
    chosen = ("--bounds", "0,2", "--corrections", "cispo", "--stale", "3", "--out", out)
    command = ("bench", "staleness", recipe, *settings, *options, *chosen)
    result = headway(*command, timeout=400)
    assert result.returncode == 0, result.stdout + result.stderr
    document = json.loads((out / "staleness.json").read_text())
    largest = {arm["name"]: arm["lag_max"] for arm in document["arms"]}
    assert list(largest) == ["0", "2", "cispo"]
    assert largest["0"] == 0
    assert largest["2"] <= 2
    assert largest["cispo"] <= 3
    for arm in document["arms"]:
        assert [seconds > 0 for seconds, _ in arm["curve"]] == [False, True, True]
        assert arm["environment"]["versions"]["torch"]
        assert arm["score"] == arm["curve"][-1][1]
        assert (arm["first_version"], arm["batches"] < 14 - 5) == (5, True)
    assert {each["name"] for each in document["predictions"]} == {"0", "2"}
    assert (out / "staleness.png").read_bytes().startswith(b"\x89PNG")
    made = (out / "eta0-seed0" / "summary.json").stat().st_mtime_ns
    again = headway(*command, timeout=100)
    assert again.returncode == 0, again.stdout + again.stderr
    assert (out / "eta0-seed0" / "summary.json").stat().st_mtime_ns == made

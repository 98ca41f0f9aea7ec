"""`headway bench staleness` and `versus-trl`: their figures, and the first from end to end."""

import json
from pathlib import Path
from statistics import fmean

import pytest

from benchmarks.harness.checkpoint_scores import INITIAL, SCORES
from benchmarks.harness.comparison import measure_scored, scored_figures
from benchmarks.harness.record import RESULTS
from benchmarks.harness.training_runs import Arm
from benchmarks.loop import comparison_report, versus_trl
from benchmarks.loop.comparison_report import interval, t_quantile
from benchmarks.loop.staleness import StalenessOptions, plan, read_arm
from deploy.config.loader import load_recipe
from deploy.errors import RunFailed
from headway.errors import InputError
from tests.benchmarks.loop.test_figures import row
from tests.deploy.conftest import RECIPE
from tests.deploy.leased import train_early
from tests.deploy.trained import create


@pytest.mark.parametrize(
    ("probability", "freedom", "table"),
    [(0.975, 1, 12.706), (0.975, 4, 2.776), (0.95, 9, 1.833), (0.975, 120, 1.980)],
)
def test_quantiles_of_students_distribution_are_those_of_the_tables(probability, freedom, table):
    assert t_quantile(probability, freedom) == pytest.approx(table, abs=6e-4)


def test_the_interval_of_five_seeds_is_students():
    low, high = interval([-0.02, -0.01, 0.0, 0.01, 0.02])
    assert high == -low == pytest.approx(2.7764 * 0.0158114 / 5**0.5, rel=1e-4)
    assert interval([0.5]) is None


def test_ratios_and_differences_are_taken_within_a_seed():
    arms = [
        {"kind": kind, "name": name, "seed": seed, "samples_per_second": speed, "score": score}
        for kind, name, seed, speed, score in (
            ("bound", "0", 0, 50.0, 0.90),
            ("bound", "0", 1, 60.0, 0.80),
            ("bound", "4", 0, 90.0, 0.91),
            ("bound", "4", 1, 120.0, 0.83),
            ("bound", "inf", 0, 100.0, 0.90),
            ("bound", "inf", 1, 120.0, 0.80),
            ("correction", "none", 0, 100.0, 0.50),
            ("correction", "none", 1, 100.0, 0.60),
        )
    ]
    predictions = [
        {"name": name, "seed": seed, "simulated": 100.0, "lag_mean": 1.0 + seed}
        for name in ("0", "4", "inf")
        for seed in (0, 1)
    ]
    result = comparison_report.conclude({"arms": arms, "predictions": predictions})
    assert result["of_predicted"] == {"0": 0.55, "4": 1.05, "inf": 1.1}
    assert result["of_unbounded"]["4"] == 0.95
    assert result["predicted_lag"]["4"] == 1.5
    assert result["score_difference"]["bound"]["4"]["each"] == pytest.approx([0.01, 0.03])
    assert result["score_difference"]["correction"]["none"]["mean"] == pytest.approx(-0.3)


@pytest.fixture
def stored():
    """Return the stored record of two bounds and two corrections on five seeds."""
    return json.loads((RESULTS / "staleness_seeds.json").read_text())


def test_the_picture_has_every_seed_and_the_predictions(stored):
    speed, *tradeoffs, by_bound, by_correction = comparison_report.picture(stored).axes
    assert [axes.get_xlabel().split(",")[0] for axes in tradeoffs] == [
        "mean lag of trained tokens", "1 − effective sample size", "KL to the policy that sampled",
    ]  # fmt: skip
    for axes in tradeoffs:
        assert [text.get_text() for text in axes.texts] == ["η = 0", "η = 8"]
    measured, dots, predicted, _ = speed.lines
    speeds = [arm["samples_per_second"] for arm in stored["arms"] if arm["name"] == "8"]
    assert measured.get_ydata()[1] == pytest.approx(fmean(speeds))
    assert list(dots.get_ydata())[-5:] == speeds
    assert predicted.get_linestyle() == "--"
    labels = [
        [text.get_text() for text in axes.get_legend().texts] for axes in (by_bound, by_correction)
    ]
    assert labels == [["η = 0", "η = 8"], ["η = 8, cispo", "η = 8, none"]]


def test_the_picture_has_no_panel_with_nothing_in_it(stored):
    stored["arms"] = [
        {**arm, "kl": None} for arm in stored["arms"] if arm["kind"] == "bound" and not arm["seed"]
    ]
    stored["predictions"] = []
    titles = [axes.get_title() for axes in comparison_report.picture(stored).axes]
    assert titles == [
        "Throughput by η", "Throughput by mean lag of trained tokens",
        "Throughput by 1 − effective sample size", "Held-out score",
    ]  # fmt: skip
    stored["arms"] = [arm for arm in stored["arms"] if arm["name"] == "0"]
    titles = [axes.get_title() for axes in comparison_report.picture(stored).axes]
    assert titles == ["Throughput by η", "Held-out score"], "lags are all 0"


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([("Headway", 0, 100.0, 10.0), ("TRL", 0, 50.0, 15.0)], (2.0, 10 / 15)),
        ([("Headway", 0, 100.0, 10.0), ("TRL", 0, 50.0, None)], (2.0, None)),
        (
            [("Headway", 0, 90.0, 9.0), ("Headway", 1, 80.0, 8.0), ("TRL", 1, 40.0, 16.0)],
            (2.0, 0.5),
        ),
        ([("TRL", 0, 40.0, 16.0)], (None, None)),
    ],
    ids=["both", "no target", "one seed failed", "Headway failed"],
)
def test_headway_stands_beside_trl_within_a_seed(runs, expected):
    keys = ("name", "seed", "samples_per_second", "seconds_to_target")
    result = versus_trl.conclude([dict(zip(keys, run, strict=True)) for run in runs])
    assert (result["throughput"], result["time"]) == expected


def test_a_recipe_with_an_objective_that_trl_does_not_get_is_refused():
    versus_trl.check_alike(load_recipe("demo"))
    with pytest.raises(InputError, match=r"learner\.advantage = 'rloo'"):
        versus_trl.check_alike(load_recipe("demo", ['learner.advantage="rloo"']))


def trained_arm(folder, *, steps, **late):
    """Return a run with a bound of 2, whose last three batches are trained after the last lease.

    Args:
        folder: Folder of the benchmark.
        steps: Batches of the run.
        late: Statistics of the last three batches.
    """
    config = load_recipe(str(RECIPE), [f"deploy.runs_dir={folder}", "name=eta2-seed0"])
    directory = create(config)
    own = {"weights_checksum", "tokens_trained", "lag_histogram"}
    fresh = {key: value for key, value in row().items() if key not in own}
    late = {**fresh, "lag_mean": 9.0, "max_lag": 9, **late}
    rows = train_early(
        directory,
        steps=steps,
        staleness=2,
        row=lambda version: fresh if version < steps - 3 else late,
    )
    (folder / INITIAL).write_text(json.dumps({"score": 0.25, "scored": 8, "failed": 0}))
    last = {"score": 0.75, "scored": 9, "failed": 3}
    (directory.path / SCORES).write_text(json.dumps({steps: last}))
    return Arm(name="2", config=config, kind="bound"), rows


def test_figures_of_a_run_are_of_the_batches_before_its_last_lease_and_scores_of_all(tmp_path):
    arm, rows = trained_arm(tmp_path, steps=14, lag_histogram={"9": 10}, ess=0.1)
    result = scored_figures(arm, read_arm(arm), 0.5)
    assert (result["first_version"], result["batches"]) == (5, 6)
    seconds = rows[10]["step_finished_at"] - rows[4]["step_finished_at"]
    tokens = sum(2 * (4 + version) for version in range(5, 11))
    assert result["samples_per_second"] == pytest.approx(2 * 6 / seconds)
    assert result["tokens_per_second"] == pytest.approx(tokens / seconds)
    assert result["tokens_per_rollout"] == tokens / (2 * 6)
    assert (result["lag_mean"], result["ess"]) == (0.0, 1.0)
    assert 0 <= result["actors_idle"] <= 1
    assert (result["lag_max"], result["score"]) == (9, 0.75), "of the whole run"
    assert result["seconds"] == rows[13]["step_finished_at"] - rows[0]["wait_started_at"]
    assert result["curve"] == [(0.0, 0.25), (result["seconds"], 0.75)]


def planned(tmp_path, **options):
    return plan(StalenessOptions(out=tmp_path / "out", **options))


def test_steps_that_leave_too_few_batches_before_the_last_lease_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"--steps 18 .* at least 19: .* the last 9 of a run"):
        planned(tmp_path, steps=18, corrections=["cispo"])
    options = {"steps": 18, "corrections": [], "bounds": ["inf", "0"], "seeds": [0, 1]}
    first, second = planned(tmp_path, **options).arms
    assert [arm.name for arm in first] == ["0", "inf"]
    assert [arm.name for arm in second] == ["inf", "0"], "every other seed backwards"


def test_runs_that_cannot_be_read_are_named_and_do_not_end_the_study(tmp_path, capsys):
    study = planned(tmp_path, bounds=["0", "1"], corrections=[], seeds=[0])
    (arms,) = study.arms
    for arm in arms:
        create(arm.config)
        if arm is arms[0]:
            train_early(arm.directory, steps=12, staleness=2)
        arm.directory.write_summary({"status": "done", "heldout": [], "heldout_sampled": []})
        (arm.directory.path / SCORES).write_text("{}")
    (tmp_path / "out" / INITIAL).write_text('{"score": 0.5}')
    Path(study.base.model.path).mkdir(parents=True)
    with pytest.raises(RunFailed, match="no arm came to its end"):
        list(measure_scored(study, read_arm))
    printed = capsys.readouterr().out
    assert "eta0-seed0 cannot be read: " in printed
    assert "trained 12 batches since it was last started, 9 of them" in printed
    assert "eta1-seed0 cannot be read: " in printed
    assert "so it is not the folder of a run" in printed


@pytest.mark.ray
@pytest.mark.deepspeed
@pytest.mark.slow
@pytest.mark.timeout(560)
def test_a_study_is_trained_scored_and_continued(headway):
    recipe = headway.arguments("run")[2]
    out = headway.folder / "study"
    paced = "actors.scripted_options.tokens_per_second=200.0"  # a plan needs the time of a token
    own = 'actors.reward=["varied:score"]'
    settings = ("--set", own, "--set", "heldout.size=8", "--set", paced)
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
    assert {row["name"] for row in document["predictions"]} == {"0", "2"}
    assert (out / "staleness.png").read_bytes().startswith(b"\x89PNG")
    assert "Throughput by mean lag" in (out / "staleness.svg").read_text()
    made = (out / "eta0-seed0" / "summary.json").stat().st_mtime_ns
    again = headway(*command, timeout=100)
    assert again.returncode == 0, again.stdout + again.stderr
    assert (out / "eta0-seed0" / "summary.json").stat().st_mtime_ns == made

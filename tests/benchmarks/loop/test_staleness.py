"""`headway bench staleness`: its figures, and all of it from end to end."""

import json
import os
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.harness.checkpoint_scores import INITIAL, SCORES
from benchmarks.harness.checkpoint_scores import RECIPE as SCORED_RECIPE
from benchmarks.harness.comparison import measure_scored, scored_figures
from benchmarks.harness.record import code_checksum
from benchmarks.harness.training_runs import Arm
from benchmarks.loop import staleness
from benchmarks.loop.first_picture import fitted_steps
from benchmarks.loop.staleness import (
    CELLS,
    StalenessOptions,
    measure,
    own_correction,
    plan,
    predict_seeds,
    read_arm,
    reference,
)
from benchmarks.loop.staleness_conclusions import conclude
from deploy.config.loader import load_recipe
from deploy.errors import RunFailed
from deploy.storage.jsonl import append_rows
from headway.errors import InputError
from tests.benchmarks.loop.study_record import run as made_run
from tests.benchmarks.loop.test_figures import row
from tests.deploy.conftest import RECIPE
from tests.deploy.leased import train_early
from tests.deploy.trained import create
from tests.waiting import until


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


def cells(arms):
    """Return bound, correction and seed of runs."""
    return [(arm.name, arm.kind, arm.seed) for arm in arms]


def test_every_seed_trains_the_core_and_the_first_the_map_in_turn(tmp_path):
    study = planned(
        tmp_path, full=True, bounds=["auto", "inf", "2", "0"], corrections=["none", "cispo"],
        seeds=[3, 4],
    )  # fmt: skip
    first, second, of_first = map(cells, study.arms)
    bounds = ("0", "2", "8", "inf", "auto")
    assert first == [(b, "cispo", 3) for b in bounds] + [("8", "none", 3)]
    assert second == [(*cell[:2], 4) for cell in reversed(first)], "every other time backwards"
    assert of_first == [("2", "none", 3), ("inf", "none", 3)]
    assert study.options.minutes == 0


def test_the_whole_study_has_every_bound_and_correction_and_five_seeds(tmp_path):
    study = planned(tmp_path, full=True)
    assert [len(arms) for arms in study.arms] == [13] * 5 + [25]
    every = {(name, kind) for arms in study.arms for name, kind, _ in cells(arms)}
    assert len(every) == 1 + 6 * 6 + 1, "at η = 0 and a bound of the run its own correction alone"


def test_engines_hold_all_that_a_bound_allows_and_without_one_as_much_as_with_16(tmp_path):
    study = planned(
        tmp_path, bounds=["0", "2", "inf", "auto"], corrections=["loglinear"], seeds=[0], steps=60
    )
    zero, two, eight, unbounded, own, other = (arm.config for arm in study.arms[0])
    for config, held in ((zero, 1), (two, 3), (eight, 9), (unbounded, 17), (own, 9), (other, 9)):
        assert config.queues.window == held * 16
        assert config.actors.max_concurrent_rollouts == held * 16 * 8
    assert (unbounded.queues.max_staleness, two.queues.max_staleness) == (60, 2)
    assert (own.queues.max_staleness, own.queues.bound) == ("auto", 8)
    assert two.learner == study.base.learner, "the recipe's own loss and correction"
    assert (other.objective.loss, other.objective.loss_options) == (
        "decoupled_ppo", {"proximal": "loglinear"},
    )  # fmt: skip
    assert two.name == "eta2-seed0", "`headway bench plan` reads it"


@pytest.mark.parametrize(
    ("bounds", "source"),
    [(["0", "2", "8"], "2"), (["8", "0", "4"], "8"), (["0", "auto", "4"], "4")],
)
def test_runs_are_predicted_from_those_with_2_or_the_largest_bound(bounds, source):
    assert reference(StalenessOptions(bounds=bounds, corrections=[]), "cispo") == source


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ([], "cispo"),
        (['learner.loss="reinforce"'], "none"),
        (['learner.loss="reinforce"', 'learner.correction="tis"'], "tis"),
        (['learner.loss="grpo"', 'learner.correction=["veto", "opsm"]'], "grpo+veto+opsm"),
    ],
)
def test_the_recipes_own_correction_is_named_as_the_recipe_names_it(settings, name):
    plain = ["learner.loss_options={}", "queues.allow_uncorrected=true"]
    assert own_correction(load_recipe("demo", [*settings, *(plain if settings else [])])) == name


def test_without_options_a_few_runs_fit_into_a_quarter_of_an_hour(tmp_path):
    options = planned(tmp_path).options
    assert (options.bounds, options.corrections, options.seeds) == (
        ("0", "2", "8"),
        ("none",),
        (0,),
    )
    assert options.minutes == 15
    assert planned(tmp_path, steps=40).options.minutes == 0
    assert planned(tmp_path, corrections=()).options.corrections == ()


def test_steps_that_leave_too_few_batches_before_the_last_lease_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"--steps 18 .* at least 19: .* the last 9 of a run"):
        planned(tmp_path, steps=18)
    assert planned(tmp_path, steps=18, corrections=[], bounds=["0", "1"]).base.steps == 18


def stored_run(bound, **environment):
    return made_run(bound, "cispo", 0) | {"environment": environment}


def store(study, runs, **facts):
    study.folder.mkdir()
    record = {"recipe_key": study.recipe_key(*CELLS), "arms": runs, **facts}
    (study.folder / "staleness.json").write_text(json.dumps(record))


def test_runs_of_the_record_are_not_trained_again_in_any_folder(tmp_path):
    study = planned(tmp_path, corrections=[], steps=40)
    store(study, [stored_run(bound, code=code_checksum(), commit="a") for bound in ("0", "2", "8")])
    continued = planned(tmp_path, corrections=[], steps=40)
    [record] = measure(continued)  # no run and no warm start is made
    assert len(conclude(record)["cells"]) == 3
    assert [run["name"] for run in record["arms"]] == ["0", "2", "8"]
    assert record["commits_of_arms"] == ["a"]
    moved = plan(StalenessOptions(out=tmp_path / "moved", corrections=[], steps=40))
    assert moved.recipe_key() == study.recipe_key()


def test_a_first_picture_goes_on_with_the_steps_that_its_short_run_gave(tmp_path):
    study = planned(tmp_path, steps=33, score_every=7)
    store(study, [], steps=33, score_every=7)
    options = planned(tmp_path).options
    assert (options.steps, options.score_every, options.minutes) == (33, 7, 0)


@pytest.mark.parametrize(
    ("options", "code", "what"),
    [
        (
            {"steps": 41},
            None,
            r"another recipe, or of other code beside it \(steps 40 and not 41\)",
        ),
        ({"steps": 40}, "older", "other code"),
    ],
)
def test_figures_of_another_recipe_or_of_other_code_are_refused(tmp_path, options, code, what):
    study = planned(tmp_path, corrections=[], steps=40)
    store(study, [stored_run("0", code=code or code_checksum())], steps=40)
    with pytest.raises(InputError, match=rf"out has figures of {what}.*, .* name another --out"):
        planned(tmp_path, corrections=[], **options)


def test_a_finished_run_of_other_code_is_refused(tmp_path):
    [arm, *_] = planned(tmp_path, corrections=[], steps=40).arms[0]
    create(arm.config)
    arm.directory.write_summary({"status": "done"})
    arm.file(".environment.json").write_text(json.dumps({"code": "older"}))
    with pytest.raises(InputError, match="figures of other code"):
        planned(tmp_path, corrections=[], steps=40)


def test_runs_that_other_code_predicted_are_predicted_again_while_the_reference_is_there(
    tmp_path, monkeypatch
):
    study, predictors, predicted = planned(tmp_path, bounds=("0", "2", "auto")), ["new"], []
    runs = [stored_run(bound) | {"predicted_by": "new"} for bound in ("0", "2", "auto")]
    monkeypatch.setattr(staleness, "code_checksum", lambda *further: predictors[-1])
    monkeypatch.setattr(staleness, "read_rates", lambda *run, **options: SimpleNamespace(rates=1))
    monkeypatch.setattr(
        staleness, "predict", lambda arm, *how: predicted.append(arm.name) or {"simulated": 1.0}
    )
    predict_seeds(study, runs)
    predictors.append("newer")
    predict_seeds(study, runs)
    assert predicted == [], "the reference run is not there"
    [reference] = [arm for arm in study.arms[0] if arm.name == "2"]
    reference.directory.path.mkdir(parents=True)
    predict_seeds(study, runs)
    predict_seeds(study, runs)
    assert predicted == ["0", "2"]
    assert [run["predicted_by"] for run in runs] == ["newer", "newer", "new"]


def test_runs_that_cannot_be_read_are_named_and_do_not_end_the_study(tmp_path, capsys):
    study = planned(tmp_path, bounds=["0", "1"], corrections=[], steps=40)
    arms = study.arms[0]
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
    assert "has trained 12 batches, 9 of them before its last group was leased" in printed
    assert "eta1-seed0 cannot be read: " in printed
    assert "so it is not the folder of a run" in printed


def finished_short_run(study, *, seconds):
    """Leave the files of a short run: a second for a batch, `seconds` for everything else."""
    folder = study.folder
    config = study.arms[0][0].config.model_copy(update={"name": "short-run", "steps": 10})
    directory = create(config)
    rows = [{"version": v, "wait_started_at": v, "step_finished_at": v + 1.0} for v in range(10)]
    append_rows(directory.path / "metrics.jsonl", rows)
    directory.write_summary({"status": "done"})
    (directory.path / SCORES).write_text('{"10": {"score": 0.5}}')
    for name in ("short-run.environment.json", SCORED_RECIPE, INITIAL):
        (folder / name).write_text("{}")
    Path(study.base.model.path).mkdir(parents=True, exist_ok=True)
    now = time.time()
    for file, at in (
        (folder / "short-run.environment.json", now), (directory.summary_file, now + 10 + seconds),
        (folder / SCORED_RECIPE, now), (folder / INITIAL, now + seconds),
        (directory.path / SCORES, now + 2 * seconds),
    ):  # fmt: skip
        os.utime(file, (at, at))


def test_steps_are_chosen_so_that_all_runs_and_scores_fit_into_the_time(tmp_path):
    study = planned(tmp_path)
    finished_short_run(study, seconds=5.0)
    [arm, *_] = study.arms[0]
    # four runs take 5 s to start and 25 s for five scores, and the engines that score start once
    assert fitted_steps(study, arm, 300.0, 19) == pytest.approx((270 - 4 * 30 - 5) // 4, abs=1)
    assert fitted_steps(study, arm, 6000.0, 19) == study.base.steps, "no more than the recipe has"
    with pytest.raises(InputError, match=r"4 runs of 9 steps fit into --minutes 3, .* --minutes 5"):
        fitted_steps(study, arm, 180.0, 19)


@pytest.mark.ray
@pytest.mark.deepspeed
@pytest.mark.slow
@pytest.mark.timeout(560)
def test_a_study_is_trained_interrupted_and_continued_from_its_runs_or_its_record(headway):
    recipe = headway.arguments("run")[2]
    out = headway.folder / "study"
    paced = "actors.scripted_options.tokens_per_second=200.0"  # a plan needs the time of a token
    own = 'actors.reward=["varied:score"]'
    settings = ("--set", own, "--set", "heldout.size=8", "--set", paced)
    options = ("--steps", "14", "--seeds", "0", "--problems", "12", "--score-every", "7")
    chosen = ("--bounds", "0,2", "--corrections", "none", "--stale", "2", "--out", out)
    command = ("bench", "staleness", recipe, *settings, *options, *chosen)
    interrupted = headway.start_plain(*command)
    until((out / "eta2-seed0" / "metrics.jsonl").exists, 400, process=interrupted)
    os.killpg(interrupted.pid, signal.SIGINT)
    assert interrupted.wait(60) == 130
    made = (out / "eta0-seed0" / "summary.json").stat().st_mtime_ns
    result = headway(*command, timeout=400)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (out / "eta0-seed0" / "summary.json").stat().st_mtime_ns == made, "it is trained once"
    document = json.loads((out / "staleness.json").read_text())
    largest = {(arm["name"], arm["kind"]): arm["lag_max"] for arm in document["arms"]}
    assert [*largest] == [("0", "cispo"), ("2", "cispo"), ("2", "none")]
    assert largest["0", "cispo"] == 0
    assert largest["2", "cispo"] <= 2
    for arm in document["arms"]:
        assert arm["versions"] == [0, 7, 14]
        assert [seconds > 0 for seconds, _ in arm["curve"]] == [False, True, True]
        assert arm["environment"]["versions"]["torch"]
        assert arm["scored"] == [8, 8, 8]
        assert arm["heldout"] == {"scored": 12, "failed": 0}
        assert (arm["first_version"], arm["batches"] < 14 - 5) == (5, True)
        assert sum(arm["lags"].values()) == pytest.approx(1.0)
        assert arm["groups_in_engines"] > 0
    assert all("simulated" in arm for arm in document["arms"] if arm["kind"] == "cispo")
    assert (out / "staleness_throughput.png").read_bytes().startswith(b"\x89PNG")
    page = (out / "staleness.md").read_text()
    assert "## What it cannot tell" in page
    for folder in out.iterdir():
        if folder.is_dir():
            shutil.rmtree(folder)
    again = headway(*command, timeout=100)
    assert again.returncode == 0, again.stdout + again.stderr
    assert json.loads((out / "staleness.json").read_text())["arms"] == document["arms"]
    assert (out / "staleness.md").read_text() == page
    assert not (out / "eta0-seed0").exists(), "nothing is trained again"

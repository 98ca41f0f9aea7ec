"""Training runs of a benchmark: their start, their names, what is refused, and resuming."""

import json
import os

import pytest

from benchmarks.harness.comparison import (
    ScoredOptions,
    check_inputs,
    initial_model,
    scored_plan,
)
from benchmarks.harness.training_runs import Arm, TrainingRuns, conditions
from deploy.config.loader import load_recipe
from deploy.preflight.models import warm_start_origin
from deploy.storage.atomic_folder import ORIGIN_FILE
from headway.errors import InputError
from tests.deploy.conftest import RECIPE
from tests.deploy.trained import create


def make_warm_start(config):
    config.warm_start.mkdir(parents=True)
    (config.warm_start / ORIGIN_FILE).write_text(warm_start_origin(config))
    return str(config.warm_start)


def recipe(folder, *settings):
    return load_recipe("demo", [f"deploy.runs_dir={folder}", *settings])


def base(tmp_path, *settings, **options):
    settings = [f"deploy.runs_dir={tmp_path / 'runs'}", *settings]
    options = ScoredOptions(**{"settings": settings, "out": tmp_path / "out", **options})
    return scored_plan(options, "staleness", lambda base: []).base


@pytest.mark.parametrize("name", ["demo", "shared"])
def test_a_warm_start_of_the_benchmark_itself_is_taken_before_one_among_the_runs(tmp_path, name):
    runs, out, setting = tmp_path / "runs", tmp_path / "out", f"sft.name={name}"
    config = recipe(runs, setting)
    assert initial_model(config, out) == str(out / f"{name}-sft/model"), "it will be made there"
    among_runs = make_warm_start(config)
    assert initial_model(config, out) == among_runs
    mine = make_warm_start(recipe(out, setting))
    assert initial_model(config, out) == mine


def test_a_warm_start_of_other_settings_in_the_folder_is_refused(tmp_path):
    make_warm_start(recipe(tmp_path / "out", "sft.steps=9"))
    with pytest.raises(InputError, match=r"made with sft\.steps = 9, not 850.*another --out"):
        initial_model(recipe(tmp_path / "runs"), tmp_path / "out")


def test_a_recipe_without_an_initial_model_is_refused_with_the_reason_of_run(tmp_path):
    config = recipe(tmp_path).model_copy(update={"sft": None})
    with pytest.raises(InputError, match="has no \\[sft\\] section; random weights"):
        initial_model(config, tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "--steps 0 must be at least 10"),
        ({"recipe": "nothing"}, "nothing"),
        ({"settings": ['actors.reward=["missing_task:score"]']}, "cannot import missing_task"),
        ({"settings": ["prompts.source=missing_task:Source"]}, "cannot import missing_task"),
        ({"settings": ["actors.environment=missing_task:Own"]}, "cannot import missing_task"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_is_written(tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        base(tmp_path, *options.pop("settings", []), **options)
    assert list(tmp_path.iterdir()) == []


def test_cores_are_chosen_where_the_recipe_has_none(tmp_path):
    chosen = base(tmp_path, recipe=str(RECIPE), steps=12)
    assert chosen.actors.cores == ("0",), "the recipe's"
    assert chosen.learner.cores is not None


def test_everything_is_checked_where_the_model_exists(tmp_path, tiny_model):
    config = recipe(tmp_path / "runs", 'learner.cores="4000"')
    model = config.model.model_copy(update={"path": str(tiny_model), "tiny": None})
    with pytest.raises(InputError, match=r"learner\.cores = '4000', but this machine's cores are"):
        check_inputs(config.model_copy(update={"model": model, "sft": None}))


@pytest.mark.parametrize(
    ("measured", "written", "line"),
    [
        (["a", "a"], "a", ""),
        (["b", "a"], "a", "runs were measured at commit a, b; this was written at a\n"),
        (["a", "a"], "b", "runs were measured at commit a; this was written at b\n"),
        (["a", None], "a", "runs were measured at commit a, unknown; this was written at a\n"),
        ([None], None, "runs were measured at commit unknown; this was written at unknown\n"),
    ],
)
def test_commits_of_runs_are_named_where_they_differ_or_are_unknown(measured, written, line):
    def run(commit):
        machine = {"load_average": [0.0]}
        return {"environment": {"commit": commit, "machine": machine} if commit else None}

    runs = [run(commit) for commit in measured]
    text = conditions({"commit": written, "arms": runs, "failed": []}) + "\n"
    assert text.partition("largest")[0].lstrip() == line


def test_a_run_is_finished_by_the_same_recipe_alone(tmp_path):
    arm = Arm(name="demo", config=recipe(tmp_path))
    assert not arm.is_finished()
    create(arm.config)
    arm.directory.write_summary({"status": "failed"})
    assert not arm.is_finished()
    arm.directory.write_summary({"status": "done"})
    assert arm.is_finished()
    other = arm.config.model_copy(update={"steps": 3})
    with pytest.raises(InputError, match="made from another recipe"):
        Arm(name="demo", config=other).is_finished()


@pytest.mark.slow
def test_a_run_that_refuses_its_input_ends_the_comparison_with_its_message(tmp_path):
    arm = Arm(name="demo", config=recipe(tmp_path))
    with pytest.raises(InputError, match=r"^the recipe has the section .sft., but .* not exist"):
        TrainingRuns(2).train([arm, arm])


def test_a_run_that_fails_is_left_out_with_its_last_line_and_its_provenance_is_kept(
    tmp_path, capsys
):
    arm = Arm(name="demo", config=recipe(tmp_path), worker=("benchmarks.missing",))
    trained, (failed,) = TrainingRuns(1).train([arm])
    assert trained == []
    assert "1/1  seed 0 · demo · time left: known after the first step" in capsys.readouterr().out
    assert failed["why"].startswith("seed 0 · demo ended with exit code 1: ")
    assert str(tmp_path / "demo.log") in failed["why"]
    assert arm.environment()["machine"]["cores"] == os.cpu_count()
    assert json.loads((tmp_path / "demo.json").read_text())["name"] == "demo"

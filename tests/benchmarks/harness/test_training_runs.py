"""Training runs of a benchmark: their start, their names, what is refused, and resuming."""

import argparse
import json
import os

import pytest

from benchmarks.harness.study import whole_numbers
from benchmarks.harness.training_runs import (
    TrainingRuns,
    Variant,
    check_inputs,
    conditions,
    describe_seconds,
    finished,
    initial_model,
    make_base,
    seconds_left,
)
from deploy.config.loader import load_recipe
from deploy.preflight.model_origins import warm_start_origin
from deploy.storage.atomic_folder import ORIGIN_FILE
from deploy.storage.run_directory import RunDirectory
from headway.errors import InputError
from tests.deploy.conftest import RECIPE


def make_warm_start(config):
    config.warm_start.mkdir(parents=True)
    (config.warm_start / ORIGIN_FILE).write_text(warm_start_origin(config))
    return str(config.warm_start)


def recipe(folder, *settings):
    return load_recipe("demo", [f"deploy.runs_dir={folder}", *settings])


def arguments(tmp_path, **changes):
    settings = [f"deploy.runs_dir={tmp_path / 'runs'}"]
    options = {"recipe": "demo", "settings": settings, "steps": None, "score_every": 5}
    options |= {"problems": 100, "out": tmp_path / "out"}
    return argparse.Namespace(**options | changes)


def test_a_warm_start_of_the_benchmark_itself_is_taken_before_one_among_the_runs(tmp_path):
    runs, out = tmp_path / "runs", tmp_path / "out"
    config = recipe(runs)
    assert initial_model(config, out) == str(out / "demo-sft" / "model"), "it will be made there"
    among_runs = make_warm_start(config)
    assert initial_model(config, out) == among_runs
    mine = make_warm_start(recipe(out))
    assert initial_model(config, out) == mine


def test_a_warm_start_is_named_as_its_recipe_says(tmp_path):
    config = recipe(tmp_path / "runs", "sft.name=shared")
    assert initial_model(config, tmp_path / "out") == str(tmp_path / "out/shared-sft/model")


def test_a_warm_start_of_other_settings_in_the_folder_is_refused(tmp_path):
    make_warm_start(recipe(tmp_path / "out", "sft.steps=9"))
    with pytest.raises(InputError, match=r"made with sft\.steps = 9, not 850.*another --out"):
        initial_model(recipe(tmp_path / "runs"), tmp_path / "out")


def test_a_recipe_without_an_initial_model_is_refused_with_the_reason_of_run(tmp_path):
    config = recipe(tmp_path).model_copy(update={"sft": None})
    with pytest.raises(InputError, match="has no \\[sft\\] section; random weights"):
        initial_model(config, tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "--steps 0 must be at least 10"),
        ({"score_every": 0}, "--score-every 0"),
        ({"recipe": "nothing"}, "nothing"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_is_written(tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        make_base(arguments(tmp_path, **changes), "staleness")
    assert list(tmp_path.iterdir()) == []


def test_a_number_that_is_written_twice_is_one():
    assert whole_numbers("2,0,00,inf,02", "--bounds", or_else="inf") == ("2", "0", "inf")
    with pytest.raises(InputError, match=r"--seeds '0,-1': give whole numbers, separated"):
        whole_numbers("0,-1", "--seeds")


def test_cores_are_chosen_where_the_recipe_has_none(tmp_path):
    base = make_base(arguments(tmp_path, recipe=str(RECIPE), steps=12), "staleness")
    assert base.actors.cores == ("0",), "the recipe's"
    assert base.learner.cores is not None


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ('actors.reward=["missing_task:score"]', "cannot import missing_task"),
        ("prompts.source=missing_task:Source", "cannot import missing_task"),
        ("actors.environment=missing_task:Episode", "cannot import missing_task"),
    ],
)
def test_user_code_is_imported_before_a_warm_start_is_made(tmp_path, setting, message):
    options = arguments(tmp_path)
    options.settings.append(setting)
    with pytest.raises(Exception, match=message) as raised:
        make_base(options, "staleness")
    assert raised.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_everything_is_checked_where_the_model_exists(tmp_path, tiny_model):
    config = recipe(tmp_path / "runs", 'learner.cores="4000"')
    model = config.model.model_copy(update={"path": str(tiny_model), "tiny": None})
    with pytest.raises(InputError, match=r"learner\.cores = '4000', but this machine's cores are"):
        check_inputs(config.model_copy(update={"model": model, "sft": None}))


@pytest.mark.parametrize(
    ("finished", "further", "elapsed", "share", "seconds"),
    [
        ([], 3, 5.0, 0.0, None),
        ([], 3, 10.0, 0.5, 10.0 + 3 * 20.0),
        ([30.0], 1, 0.0, 0.0, 30.0 + 30.0),
        ([30.0], 1, 40.0, 0.0, 0.0 + 35.0),
        ([30.0], 1, 40.0, 0.8, 10.0 + 40.0),
    ],
)
def test_the_time_left_is_that_of_this_run_and_of_those_after_it(
    finished, further, elapsed, share, seconds
):
    left = seconds_left(finished, further, elapsed=elapsed, share=share)
    assert left == (None if seconds is None else pytest.approx(seconds))


def test_the_time_left_is_described():
    assert describe_seconds(None) == "time left: known after the first step"
    assert describe_seconds(42.4) == "about 42 s left"
    assert describe_seconds(150.0) == "about 2 min left"


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
    config = recipe(tmp_path)
    directory = RunDirectory.of(config)
    assert not finished(directory, config)
    with directory.created(config, replace=False):
        pass
    directory.write_summary({"status": "failed"})
    assert not finished(directory, config)
    directory.write_summary({"status": "done"})
    assert finished(directory, config)
    with pytest.raises(InputError, match="made from another recipe"):
        finished(directory, config.model_copy(update={"steps": 3}))


def test_a_run_that_refuses_its_input_ends_the_comparison_with_its_message(tmp_path):
    variant = Variant("demo", 0, recipe(tmp_path))
    with pytest.raises(InputError, match=r"^the recipe has an .sft. section, but .* not exist"):
        TrainingRuns(tmp_path, 2).train([variant, variant])


def test_a_run_that_fails_is_left_out_with_its_last_line_and_its_provenance_is_kept(
    tmp_path, capsys
):
    variant = Variant("demo", 0, recipe(tmp_path), worker=("benchmarks.missing",))
    trained, (failed,) = TrainingRuns(tmp_path, 1).train([variant])
    assert trained == []
    assert "1/1  seed 0 · demo · time left: known after the first step" in capsys.readouterr().out
    assert failed["why"].startswith("seed 0 · demo ended with exit code 1: ")
    assert str(tmp_path / "demo.log") in failed["why"]
    machine = variant.environment()["machine"]
    assert machine["cores"] == os.cpu_count()
    assert json.loads((tmp_path / "demo.json").read_text())["name"] == "demo"

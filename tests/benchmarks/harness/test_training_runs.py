"""Training runs of a benchmark: their start, their names, what is refused, and resuming."""

import argparse
import json
import os

import pytest

from benchmarks.harness.study import whole_numbers
from benchmarks.harness.training_runs import (
    TrainingRuns,
    Variant,
    check_devices,
    conditions,
    finished,
    initial_model,
    make_base,
)
from deploy.config.loader import load_recipe
from deploy.errors import InputError
from deploy.preflight.provenance import ORIGIN_FILE, warm_start_origin
from deploy.storage.run_directory import RunDirectory


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


def test_gpus_are_as_good_as_cores():
    def check(**section):
        actors, learner = base.actors.model_copy(update=section), base.learner
        learner = learner.model_copy(update=section)
        check_devices(base.model_copy(update={"actors": actors, "learner": learner}))

    base = load_recipe("demo")
    check()
    check(cores=None, gpus=1)
    with pytest.raises(InputError, match=r"needs actors\.cores and learner\.cores"):
        check(cores=None)


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
    directory.create(config, replace=False)
    directory.write_summary({"status": "failed"})
    assert not finished(directory, config)
    directory.write_summary({"status": "done"})
    assert finished(directory, config)
    with pytest.raises(InputError, match="made from another recipe"):
        finished(directory, config.model_copy(update={"steps": 3}))


def test_a_run_that_fails_is_left_out_with_its_last_line_and_its_provenance_is_kept(tmp_path):
    variant = Variant("demo", 0, recipe(tmp_path))
    trained, (failed,) = TrainingRuns(tmp_path, 1).train([variant])
    assert trained == []
    assert failed["why"].startswith("seed 0 · demo ended with exit code 2: headway: ")
    assert str(tmp_path / "demo.log") in failed["why"]
    machine = variant.environment()["machine"]
    assert machine["cores"] == os.cpu_count()
    assert json.loads((tmp_path / "demo.json").read_text())["name"] == "demo"

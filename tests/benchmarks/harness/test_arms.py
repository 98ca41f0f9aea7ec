"""What arms of a benchmark start from, and how they are named, refused and gone on with."""

import argparse
import io
import json
import os

import pytest
from rich.console import Console
from rich.progress import Progress

from benchmarks.harness.arms import (
    check_devices,
    finished,
    initial_model,
    make_base,
    numbers,
    show_conditions,
)
from benchmarks.harness.subprocesses import Children, read_environment
from deploy.config.loader import load_recipe
from deploy.errors import InputError, RunFailed
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
    given = {"recipe": "demo", "settings": settings, "steps": None, "score_every": 5}
    given |= {"problems": 100, "out": tmp_path / "out"}
    return argparse.Namespace(**given | changes)


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
    assert numbers("2,0,00,inf,02", "--bounds", or_else="inf") == ("2", "0", "inf")
    with pytest.raises(InputError, match=r"--seeds '0,-1': give whole numbers, separated"):
        numbers("0,-1", "--seeds")


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
        (["b", "a"], "a", "arms were measured at commit a, b; this was written at a\n"),
        (["a", "a"], "b", "arms were measured at commit a; this was written at b\n"),
        (["a", None], "a", "arms were measured at commit a, unknown; this was written at a\n"),
        ([None], None, "arms were measured at commit unknown; this was written at unknown\n"),
    ],
)
def test_commits_of_arms_are_told_where_they_differ_or_are_unknown(measured, written, line):
    def arm(commit):
        machine = {"load_average": [0.0]}
        return {"environment": {"commit": commit, "machine": machine} if commit else None}

    told = Console(file=io.StringIO(), width=200)
    arms = [arm(commit) for commit in measured]
    show_conditions({"commit": written, "arms": arms, "failed": []}, told)
    assert told.file.getvalue().partition("largest")[0] == line


def test_an_arm_is_finished_by_the_same_recipe_alone(tmp_path):
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


def test_an_arm_that_fails_names_its_last_words_and_what_it_ran_on(tmp_path):
    config = recipe(tmp_path)
    with Progress(console=Console(file=io.StringIO())) as progress:
        children = Children(tmp_path, progress, 1)
        with pytest.raises(RunFailed, match="arm ended with exit code 2: headway: ") as failure:
            children.run("arm", "train", config)
    assert str(tmp_path / "demo.log") in str(failure.value)
    machine = read_environment(tmp_path, config)["machine"]
    assert machine["cores"] == os.cpu_count()
    assert json.loads((tmp_path / "demo.json").read_text())["name"] == "demo"

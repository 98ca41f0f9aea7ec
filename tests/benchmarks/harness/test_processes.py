"""Processes of a benchmark: how they begin, their errors, and the time left."""

import os
import subprocess
import sys

import pytest

from benchmarks.harness.processes import Progress, raise_failure
from deploy.cli.bench import ROOT
from deploy.config.loader import load_recipe
from deploy.errors import RunFailed
from headway.errors import InputError
from tests.deploy.conftest import RECIPE

CHILDREN = {
    "benchmarks.loop.run_worker": ("RECIPE", "train"),
    "benchmarks.harness.checkpoint_scores": ("0.0", "RECIPE"),
}
"""Modules that a comparison runs as processes of their own, and their arguments."""


@pytest.mark.slow
@pytest.mark.parametrize("module", CHILDREN)
def test_a_module_of_the_user_is_found_in_every_process_and_its_error_is_one_message(
    module, tmp_path, tiny_model
):
    (tmp_path / "my_task.py").write_text("def other(): ...\n")
    settings = ['actors.reward=["my_task:score"]', f"deploy.runs_dir={tmp_path / 'runs'}"]
    config = load_recipe(str(RECIPE), settings)
    model = config.model.model_copy(update={"path": str(tiny_model), "tiny": None})
    config = config.model_copy(update={"model": model, "sft": None})
    recipe = tmp_path / "recipe.json"
    recipe.write_text(config.model_dump_json())
    ended = subprocess.run(
        [sys.executable, "-m", module, *(recipe if x == "RECIPE" else x for x in CHILDREN[module])],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    message = "'my_task:score': my_task has no 'score', only other"
    assert (ended.returncode, ended.stdout) == (2, ""), ended.stderr
    assert ended.stderr == f"headway: actors.reward = {message}\n"
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("code", "log", "error", "message"),
    [
        (2, "loading\nheadway: no key\nno value\n", InputError, "no key\nno value"),
        (2, "cannot open file\n", RunFailed, "a run ended with exit code 2: cannot open file"),
        (1, "headway: it\ndied\n", RunFailed, "a run ended with exit code 1: died"),
        (-9, "", RunFailed, "a run ended with exit code -9: (no output)"),
    ],
)
def test_the_error_of_a_process_is_that_of_its_exit_code(tmp_path, code, log, error, message):
    file = tmp_path / "log"
    file.write_text(log)
    raise_failure("a run", 0, file)
    with pytest.raises(error) as raised:
        raise_failure("a run", code, file)
    logged = f"\nits log is {file}" if error is RunFailed else ""
    assert str(raised.value) == message + logged


@pytest.mark.parametrize(
    ("finished", "further", "elapsed", "done", "text"),
    [
        ([], 3, 5.0, 0, "time left: known after the first step"),
        ([], 3, 10.0, 5, "about 70 s left"),
        ([30.0], 1, 0.0, 0, "about 60 s left"),
        ([30.0], 1, 40.0, 0, "about 35 s left"),
        ([30.0], 1, 40.0, 8, "about 50 s left"),
        ([], 9, 30.0, 10, "about 4 min left"),
    ],
)
def test_the_time_left_is_that_of_this_run_and_of_those_after_it(
    tmp_path, finished, further, elapsed, done, text
):
    progress = Progress(
        label="", title="", lines=tmp_path / "x", total=10, finished=finished, further=further
    )
    assert progress.describe(done, elapsed) == text


def test_a_step_counts_when_its_line_is_whole(tmp_path):
    progress = Progress(label="", title="", lines=tmp_path / "lines", total=3)
    assert progress.done() == 0
    progress.lines.write_text("{}\n{}\n{")
    assert progress.done() == 2

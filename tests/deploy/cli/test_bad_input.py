"""What users get wrong, through the real command: one message, its exit code, nothing left behind.

Refused is what can be told without Ray; those tests share this process, since importing torch for
each would take minutes. What only a run can show goes through a process of its own.
"""

import importlib
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy.cli import app as cli
from tests.deploy.broken import HELD, Case, sets, tokenizer
from tests.deploy.broken_inputs import INPUTS
from tests.deploy.broken_runs import REWARD_RAISES, SLOW_RUNS, TOO_FEW_RESOURCES

BROKEN_RECIPE = sets(
    "unknown key", "learner.lerning_rate=1", "learner.lerning_rate", "'learning_rate'"
)
HEADWAY = Path(sys.executable).parent / "headway"


def ids(cases: list[Case]) -> list[str]:
    return [case.name for case in cases]


def tree(folder: Path) -> set[str]:
    """Everything in a folder but what Python caches and SQLite leaves where it has read."""
    passing = ("-wal", "-shm")
    found = (path for path in folder.rglob("*") if "__pycache__" not in path.parts)
    return {str(path) for path in found if not path.name.endswith(passing)}


def lay_out(case: Case, folder: Path, tiny_model: Path) -> list[str]:
    """Prepare the folder that the command runs in; return the arguments of the command."""
    (folder / "recipe.toml").write_text(case.recipe)
    shutil.copytree(tiny_model, folder / "model")
    if case.prepare is not None:
        case.prepare(folder)
    settings = [part for setting in case.settings for part in ("--set", setting)]
    return [case.command, "recipe.toml", *settings]


def check_message(case: Case, code: int | str | None, output: str, errors: str) -> None:
    assert code == case.code, output + errors
    assert "Traceback" not in output + errors
    messages = [line for line in errors.splitlines() if line.startswith("headway: ")]
    assert len(messages) == 1, errors
    for words in case.words:
        assert words in errors
    assert "Input should" not in errors


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Provide a folder to run in; forget the user's module that was imported, and its functions."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("deploy.runtime.session_process.begin_session", lambda end_leftovers: None)
    from learner.config.traits import ESTIMATORS, LOSSES

    shipped = {*LOSSES, *ESTIMATORS}
    importlib.invalidate_caches()
    yield tmp_path
    for registry in (LOSSES, ESTIMATORS):
        registry.forget({*registry} - shipped)
    sys.modules.pop("mine", None)
    while HELD:
        HELD.pop().close()


def refuse(case, folder, tiny_model, monkeypatch, capfd):
    """Run the command in this process."""
    arguments = lay_out(case, folder, tiny_model)
    before = tree(folder)
    monkeypatch.setattr(sys, "argv", ["headway", *arguments])
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main()
    check_message(case, ended.value.code, *capfd.readouterr())
    assert tree(folder) == before


@pytest.mark.parametrize("command", ["validate", "run"])
def test_a_broken_recipe_is_refused(command, here, tiny_model, monkeypatch, capfd):
    refuse(replace(BROKEN_RECIPE, command=command), here, tiny_model, monkeypatch, capfd)


@pytest.mark.parametrize("case", INPUTS, ids=ids(INPUTS))
def test_what_a_recipe_names_is_checked_before_anything_is_written(
    case, here, tiny_model, monkeypatch, capfd
):
    refuse(case, here, tiny_model, monkeypatch, capfd)


def test_a_recipe_that_is_a_folder_is_refused(here, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["headway", "run", str(here)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    case = Case("folder", ["is a folder", "name a TOML file"])
    check_message(case, ended.value.code, *capfd.readouterr())


def test_a_tokenizer_without_padding_is_fine(here, tiny_model):
    from actors.config import ActorsConfig
    from actors.rollout.prompt_checks import check_fit

    lay_out(Case("", [], prepare=tokenizer(pad_token=None)), here, tiny_model)
    check_fit(str(here / "model"), ActorsConfig(engine="scripted"), [])


def start(folder: Path, arguments: list[str], **options: Any) -> "subprocess.Popen[str]":
    """Start the command in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    return subprocess.Popen(
        [HEADWAY, *arguments], cwd=folder, env=environment, text=True, **options
    )


def run(
    folder: Path, arguments: list[str], timeout: float = 600
) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, to its end."""
    process = start(folder, arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        output, errors = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return subprocess.CompletedProcess(arguments, process.returncode, output, errors)


@pytest.mark.parametrize("case", [BROKEN_RECIPE, INPUTS[0]], ids=ids([BROKEN_RECIPE, INPUTS[0]]))
def test_the_installed_command_refuses_alike(case, tmp_path, tiny_model):
    arguments = lay_out(case, tmp_path, tiny_model)
    before = tree(tmp_path)
    result = run(tmp_path, arguments)
    check_message(case, result.returncode, result.stdout, result.stderr)
    assert tree(tmp_path) == before


def end(case: Case, folder: Path, tiny_model: Path) -> Path:
    """Run the command, which fails, and return the folder of runs."""
    arguments = lay_out(case, folder, tiny_model)
    before = tree(folder)
    result = run(folder, arguments)
    check_message(case, result.returncode, result.stdout, result.stderr)
    if case.code == 2:
        assert tree(folder) == before
    return folder / "runs"


@pytest.mark.ray
@pytest.mark.deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("case", [REWARD_RAISES, TOO_FEW_RESOURCES], ids=lambda case: case.name)
def test_what_a_run_finds_out_ends_it_with_one_message(case, tmp_path, tiny_model):
    end(case, tmp_path, tiny_model)


@pytest.mark.ray
@pytest.mark.deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW_RUNS, ids=ids(SLOW_RUNS))
def test_code_and_prompts_that_fail_later_end_the_run_alike(case, tmp_path, tiny_model):
    runs = end(case, tmp_path, tiny_model)
    assert json.loads((runs / "bad" / "summary.json").read_text())["status"] == "failed"


@pytest.mark.ray
@pytest.mark.deepspeed
@pytest.mark.slow
def test_a_run_whose_disk_fills_says_so_and_goes_on_when_space_is_freed(
    tmp_path, tiny_model, mount_disk
):
    small_disk = mount_disk("2m")
    settings = [f"deploy.runs_dir={small_disk}", "steps=8", "learner.checkpoint_every=1"]
    arguments = lay_out(sets("full", settings), tmp_path, tiny_model)
    output = tmp_path / "output"
    with output.open("w") as file:
        process = start(tmp_path, arguments, stdout=file, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 300
        while f"paused: no space is left on the disk of {small_disk}" not in output.read_text():
            assert process.poll() is None, output.read_text()
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.1)
        subprocess.run(["mount", "-o", "remount,size=256m", small_disk], check=True)
        assert process.wait(300) == 0, output.read_text()
    finally:
        process.kill()
        process.wait()
    summary = json.loads((small_disk / "bad" / "summary.json").read_text())
    assert (summary["status"], summary["version"]) == ("done", 8)
    assert summary["accounting"]["balanced"]

"""What users get wrong, through the real command: one message, its exit code, nothing left behind.

Refused is what can be told without Ray; those tests share this process, since importing torch for
each would take minutes. What only a run can show goes through a process of its own.
"""

import importlib
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.storage.run_directory import RunDirectory
from tests.deploy.broken import HELD, Case, sets, tokenizer
from tests.deploy.broken_inputs import INPUTS
from tests.deploy.broken_runs import REWARD_RAISES, SLOW_RUNS, TOO_FEW_RESOURCES
from tests.deploy.conftest import ENVIRONMENT, HEADWAY, Headway, call_main
from tests.waiting import until

BROKEN_RECIPE = sets(
    "unknown key", "learner.lerning_rate=1", "learner.lerning_rate", "'learning_rate'"
)


def ids(cases: list[Case]) -> list[str]:
    return [case.name for case in cases]


def tree(folder: Path) -> set[str]:
    """Everything in a folder but what Python caches and SQLite leaves where it has read."""
    passing = ("-wal", "-shm")
    paths = (path for path in folder.rglob("*") if "__pycache__" not in path.parts)
    return {str(path) for path in paths if not path.name.endswith(passing)}


def lay_out(case: Case, folder: Path, tiny_model: Path) -> list[str]:
    """Prepare the folder that the command runs in; return the arguments of the command."""
    (folder / "recipe.toml").write_text(case.recipe)
    shutil.copytree(tiny_model, folder / "model")
    if case.prepare is not None:
        case.prepare(folder)
    settings = [part for setting in case.settings for part in ("--set", setting)]
    return [case.command, "recipe.toml", *settings]


def check_message(case: Case, result: "subprocess.CompletedProcess[str]") -> None:
    output, errors = result.stdout, result.stderr
    assert result.returncode == case.code, output + errors
    assert "Traceback" not in output + errors
    messages = [line for line in errors.splitlines() if line.startswith("headway: ")]
    assert len(messages) == 1, errors
    for words in case.words:
        assert words in errors
    assert "Input should" not in errors


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Provide a folder to run in; forget the user's module that was imported, and its functions."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    from learner.config.traits import ESTIMATORS, LOSSES

    shipped = {*LOSSES, *ESTIMATORS}
    importlib.invalidate_caches()
    yield tmp_path
    for registry in (LOSSES, ESTIMATORS):
        registry.forget({*registry} - shipped)
    sys.modules.pop("mine", None)
    while HELD:
        HELD.pop().close()


def refuse(case, folder, tiny_model, call=call_main):
    """Run the command, in this process by default."""
    arguments = lay_out(case, folder, tiny_model)
    before = tree(folder)
    check_message(case, call(arguments, folder))
    if case.code == 2:
        assert tree(folder) == before


@pytest.mark.parametrize("command", ["validate", "run"])
def test_a_broken_recipe_is_refused(command, here, tiny_model):
    refuse(replace(BROKEN_RECIPE, command=command), here, tiny_model)


@pytest.mark.parametrize("case", INPUTS, ids=ids(INPUTS))
def test_what_a_recipe_names_is_checked_before_anything_is_written(case, here, tiny_model):
    refuse(case, here, tiny_model)


def test_a_recipe_that_is_a_folder_is_refused(here):
    case = Case("folder", ["is a folder", "name a TOML file"])
    check_message(case, call_main(["run", here], here))


def test_a_tokenizer_without_padding_is_fine(here, tiny_model):
    from actors.config import ActorsConfig
    from actors.rollout.prompt_checks import check_fit

    lay_out(Case("", [], prepare=tokenizer(pad_token=None)), here, tiny_model)
    check_fit(str(here / "model"), ActorsConfig(engine="scripted"), [])


def installed(arguments: list[str], folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run the command in a process of its own."""
    return Headway(folder)(*arguments)


@pytest.mark.parametrize("case", [BROKEN_RECIPE, INPUTS[0]], ids=ids([BROKEN_RECIPE, INPUTS[0]]))
def test_the_installed_command_refuses_alike(case, tmp_path, tiny_model):
    refuse(case, tmp_path, tiny_model, installed)


@pytest.mark.ray
@pytest.mark.deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("case", [REWARD_RAISES, TOO_FEW_RESOURCES], ids=lambda case: case.name)
def test_what_a_run_finds_out_ends_it_with_one_message(case, tmp_path, tiny_model):
    refuse(case, tmp_path, tiny_model, installed)


@pytest.mark.ray
@pytest.mark.deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW_RUNS, ids=ids(SLOW_RUNS))
def test_code_and_prompts_that_fail_later_end_the_run_alike(case, tmp_path, tiny_model):
    refuse(case, tmp_path, tiny_model, installed)
    assert RunDirectory(tmp_path / "runs" / "bad").summary()["status"] == "failed"


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
        process = subprocess.Popen(
            [HEADWAY, *arguments], cwd=tmp_path, env=ENVIRONMENT, stdout=file, stderr=file
        )
    try:
        paused = f"paused: no space is left on the disk of {small_disk}"
        until(lambda: paused in output.read_text(), 300, process=process, output=output.read_text)
        subprocess.run(["mount", "-o", "remount,size=256m", small_disk], check=True)
        assert process.wait(300) == 0, output.read_text()
    finally:
        process.kill()
        process.wait()
    summary = RunDirectory(small_disk / "bad").summary()
    assert (summary["status"], summary["version"]) == ("done", 8)
    assert summary["accounting"]["balanced"]

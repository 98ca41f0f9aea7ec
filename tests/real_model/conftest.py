"""The folder of SmolLM2-135M-Instruct, which `make real-model` writes, and runs that train it."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.deploy.conftest import REWARD, FinishedRun, Headway

MODEL = Path(__file__).parents[2] / "examples" / "smollm2" / "model"
RECIPE = Path(__file__).parent / "recipe.toml"


@pytest.fixture(scope="session")
def model():
    """Provide the folder of the model."""
    if not (MODEL / "tokenizer.json").exists():
        pytest.skip(f"`make real-model` writes {MODEL}")
    return MODEL


class Commands(Headway):
    """Commands with the recipe of this folder, on the real model."""

    def arguments(self, command, *settings):
        settings = (f"model.path={MODEL}", *settings)
        given = [part for setting in settings for part in ("--set", setting)]
        return [super().arguments(command)[0], command, RECIPE, *given]

    def done(self, *arguments, **options):
        """Run a command that has to succeed, and return what it printed."""
        result = self(*arguments, **options)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    def interrupt(self, name, *settings, after):
        """Run until so many batches are trained, then send Ctrl-C as a terminal does."""
        process = self.start("run", f"name={name}", *settings)
        self.wait_for_batches(name, after, process)
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=180)
        assert process.returncode == 130, output


@pytest.fixture(scope="session")
def commands(model, tmp_path_factory):
    """Provide the commands in a folder with the reward of the recipe."""
    command = Commands(tmp_path_factory.mktemp("real"))
    (command.folder / "varied.py").write_text(REWARD)
    return command


@dataclass(frozen=True)
class Trained:
    """A finished run, and what was exported from it."""

    run: FinishedRun
    steps: int
    sessions: int
    start: Path
    """Model that the run began with."""
    export: Path
    adapter: Path | None = None


@pytest.fixture(scope="session")
def trained(commands):
    """Provide a run of whole weights in float32, after a warm start, with Ctrl-C in its midst."""
    commands.done(*commands.arguments("sft")[1:])
    commands.interrupt("whole", after=1)
    output = commands.done("resume", "whole")
    commands.done("export", "whole", "--to", "exported")
    run = FinishedRun(commands.run_folder("whole"), output)
    start = commands.run_folder("real-sft") / "model"
    return Trained(run, 3, 2, start, commands.folder / "exported")


@pytest.fixture(scope="session")
def adapted(commands, trained):
    """Provide a run of two batches that trains an adapter, after the same warm start."""
    settings = ("name=adapted", "steps=2", "learner.lora.rank=8", "learner.learning_rate=1e-3")
    output = commands.done(*commands.arguments("run", *settings)[1:])
    commands.done("export", "adapted", "--to", "merged")
    commands.done("export", "adapted", "--to", "adapter", "--adapter")
    run = FinishedRun(commands.run_folder("adapted"), output)
    folder = commands.folder
    return Trained(run, 2, 1, trained.start, folder / "merged", folder / "adapter")

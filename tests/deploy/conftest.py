"""The command `headway` as users run it: in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
"""Makes the tables of this folder importable under pytest's importlib mode."""

RECIPE = Path(__file__).parent / "recipe.toml"
HEADWAY = Path(sys.executable).parent / "headway"
MARK = "HEADWAY_TEST_FOLDER"
"""In the environment of every process that a command starts."""
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}


class Headway:
    """Runs commands in a folder of their own, which also holds the runs."""

    def __init__(self, folder):
        self.folder = folder
        self.environment = {**ENVIRONMENT, MARK: str(folder)}

    def arguments(self, command, *settings):
        return [HEADWAY, command, RECIPE, *(part for s in settings for part in ("--set", s))]

    def __call__(self, *arguments, timeout=600):
        return subprocess.run(
            [HEADWAY, *arguments],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def recipe(self, command, *settings, timeout=600):
        return self(*self.arguments(command, *settings)[1:], timeout=timeout)

    def start(self, command, *settings):
        return self.start_plain(*self.arguments(command, *settings)[1:])

    def start_plain(self, *arguments):
        """In a process group of its own, as a terminal starts a command."""
        return subprocess.Popen(
            [HEADWAY, *arguments],
            start_new_session=True,
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


@pytest.fixture(scope="session")
def headway(tmp_path_factory):
    """Commands in a folder where the warm start of the small recipe is made."""
    command = Headway(tmp_path_factory.mktemp("headway"))
    made = command.recipe("sft")
    assert made.returncode == 0, made.stderr
    return command


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A model folder with a token per character of the lettered sums, and a context of 256."""
    from learner.config.learner import TinyModelConfig
    from learner.model.policy import build_tiny

    folder = tmp_path_factory.mktemp("tiny") / "model"
    sizes = {"hidden_size": 32, "layers": 2, "intermediate_size": 48, "heads": 2, "kv_heads": 1}
    characters = "0123456789+-=,abcdefghijklmnopqr"
    build_tiny(TinyModelConfig(characters=characters, context=256, **sizes), folder, seed=0)
    return folder

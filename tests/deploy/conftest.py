"""The command `headway` as users run it: in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = Path(__file__).parent / "recipe.toml"
HEADWAY = Path(sys.executable).parent / "headway"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}


class Headway:
    """Runs commands in a folder of their own, which also holds the runs."""

    def __init__(self, folder):
        self.folder = folder

    def arguments(self, command, *settings):
        return [HEADWAY, command, RECIPE, *(part for s in settings for part in ("--set", s))]

    def __call__(self, *arguments, timeout=240):
        return subprocess.run(
            [HEADWAY, *arguments],
            cwd=self.folder,
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def recipe(self, command, *settings, timeout=240):
        return self(*self.arguments(command, *settings)[1:], timeout=timeout)

    def start(self, command, *settings):
        return subprocess.Popen(
            self.arguments(command, *settings),
            cwd=self.folder,
            env=ENVIRONMENT,
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

"""The command `headway` as users call it, and finished runs that many tests read."""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest

from deploy.cli import main
from deploy.config.loader import SHIPPED_RECIPES
from deploy.runtime import session_process
from deploy.runtime.signals import interrupts
from deploy.storage.run_directory import RunDirectory
from tests.waiting import until

RECIPE = Path(__file__).parent / "recipe.toml"
HEADWAY = Path(sys.executable).parent / "headway"
MARK = "HEADWAY_TEST_FOLDER"
"""Environment variable of every process that a command starts."""
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}
REWARD = """
def score(prompt, completion, answer, metadata):
    return sum(map(ord, completion)) % 7 / 7  # no answer of the scripted engine is right
"""
KEPT_FILES = {
    "LICENSE": "as it was",
    "custom_generate/generate.py": "",
    "generation_config.json": '{"do_sample": false,  "temperature": 0.6, "eos_token_id": 1}',
}
"""Files of the warm start that runs keep; transformers does not save such generation settings."""


def call_main(arguments, folder):
    """Call `headway` in this process, with `folder` as its working directory."""
    output, errors = io.StringIO(), io.StringIO()
    handlers = {number: signal.getsignal(number) for number in interrupts()}
    code = 0
    try:
        with (
            contextlib.chdir(folder),
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(errors),
            mock.patch.object(sys, "argv", ["headway", *map(str, arguments)]),
            mock.patch.object(sys, "path", list(sys.path)),
            mock.patch.dict(os.environ, {"COLUMNS": "120"}),
            mock.patch.object(session_process, "begin_session", return_value=None),
        ):
            main()
    except SystemExit as ended:
        code = ended.code or 0
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return subprocess.CompletedProcess(arguments, code, output.getvalue(), errors.getvalue())


class Headway:
    """Commands that share a working directory, which also holds the runs."""

    def __init__(self, folder):
        self.folder = folder
        self.environment = {**ENVIRONMENT, MARK: str(folder)}

    def run_folder(self, name):
        return self.folder / "runs" / name

    def arguments(self, command, *settings):
        return [HEADWAY, command, RECIPE, *(part for s in settings for part in ("--set", s))]

    def __call__(self, *arguments, timeout=600):
        """Run a command in a process of its own."""
        return subprocess.run(
            [HEADWAY, *arguments],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def call(self, *arguments):
        """Run a command in this process: faster, for commands that start no process."""
        return call_main(arguments, self.folder)

    def recipe(self, command, *settings, timeout=600):
        return self(*self.arguments(command, *settings)[1:], timeout=timeout)

    def start(self, command, *settings):
        return self.start_plain(*self.arguments(command, *settings)[1:])

    def start_plain(self, *arguments):
        """Start a command in a process group of its own, as a terminal does."""
        return subprocess.Popen(
            [HEADWAY, *arguments],
            start_new_session=True,
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(self, name, *settings):
        """Run the small recipe under a name to its end."""
        result = self.recipe("run", f"name={name}", *settings)
        assert result.returncode == 0, result.stdout + result.stderr
        return FinishedRun(self.run_folder(name), result.stdout)

    def wait_for_batches(self, name, count, process, seconds=300):
        """Wait until a run has trained so many batches."""
        metrics = self.run_folder(name) / "metrics.jsonl"
        until(lambda: len(read_rows(metrics)) >= count, seconds, process=process)

    def accounting(self, name):
        result = self.call("inspect", name, "--json")
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    def rollouts(self, name):
        """Return the rollouts of a run as `headway inspect --parquet` exports them."""
        import pyarrow.parquet

        file = self.folder / f"{name}.parquet"
        result = self.call("inspect", name, "--parquet", file)
        assert result.returncode == 0, result.stderr
        return pyarrow.parquet.read_table(file).to_pylist()


def read_rows(file):
    """Return the records of a JSON-lines file; a line that is being written is left out."""
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


@dataclass(frozen=True)
class FinishedRun:
    """A run that has ended: its folder, and what it printed."""

    folder: Path
    output: str

    @property
    def summary(self):
        return RunDirectory(self.folder).summary()

    def rows(self, name):
        return read_rows(self.folder / name)


@pytest.fixture(scope="session")
def headway(tmp_path_factory):
    """Commands in a folder with the warm start that all runs of the small recipe share."""
    command = Headway(tmp_path_factory.mktemp("headway"))
    made = command.recipe("sft")
    assert made.returncode == 0, made.stderr
    (command.folder / "varied.py").write_text(REWARD)
    for name, text in KEPT_FILES.items():
        file = command.folder / "runs/small-sft/model" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    return command


@pytest.fixture(scope="session")
def demo_folder(tmp_path_factory):
    """Return a folder with the warm start of the demo, and `learned.toml`, which goes on from it.

    Runs of that recipe may have any seed; those of the demo that of the warm start.
    """
    folder = tmp_path_factory.mktemp("demo")
    subprocess.run([HEADWAY, "sft", "demo"], cwd=folder, check=True)
    recipe = (SHIPPED_RECIPES / "demo.toml").read_text()
    before, _, rest = recipe.partition("[model.tiny]")
    model = '[model]\npath = "runs/demo-sft/model"\n\n'
    (folder / "learned.toml").write_text(before + model + rest[rest.index("[prompts]") :])
    return folder


def run_demo(folder, name, *settings):
    """Return the exit code of the demo from its warm start, its output, and its batches.

    It scores few held-out problems, and after the last batch alone.
    """
    sizes = ("heldout.every=1000", "heldout.size=50", "heldout.final_size=50")
    chosen = [f"name={name}", *sizes, *settings]
    command = [HEADWAY, "run", "learned.toml", *(x for one in chosen for x in ("--set", one))]
    done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
    rows = read_rows(folder / "runs" / name / "metrics.jsonl")
    return done.returncode, done.stdout + done.stderr, rows


@pytest.fixture(scope="session")
def finished(headway):
    """Provide a run of six batches that tests read, and copy where they change something.

    It has checkpoints at versions 2, 4 and 6, and sends weights as deltas over a shared folder.
    """
    return headway.finish(
        "small", "steps=6", "learner.keep_checkpoints=3", 'actors.reward=["varied:score"]',
        "weight_sync.transport=filesystem", f"weight_sync.folder={headway.folder / 'weights'}",
        "weight_sync.codec=delta", "weight_sync.wire_dtype=bfloat16", "learner.learning_rate=1e-6",
    )  # fmt: skip


@pytest.fixture
def copied_run(headway, finished):
    """Provide a copy of the finished run that a test may change."""
    folder = headway.run_folder("copied")
    shutil.copytree(finished.folder, folder)
    recipe = folder / "recipe.toml"
    recipe.write_text(recipe.read_text().replace('name = "small"', 'name = "copied"', 1))
    yield folder
    shutil.rmtree(folder)

"""A run that goes on in a process of its own, and the results in its folder.

The calling process may have a running event loop, as a notebook has: nothing here uses it, and only
iteration and `wait` block.
"""

import atexit
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow

from deploy.config.loader import load_recipe
from deploy.config.messages import section_of
from deploy.config.recipe_text import toml_value
from deploy.config.run_config import RunConfig
from deploy.errors import Interrupted, RunFailed
from deploy.storage.run_directory import RunDirectory
from deploy.storage.sessions import resumed_recipe
from headway.errors import InputError

COMMAND = (sys.executable, "-P", "-c", "from deploy.cli import main; main()")
INTERRUPTED = (Interrupted.exit_code, -signal.SIGINT)
"""Exit codes of a run that was stopped, during its preparations too."""
POLL_SECONDS = 0.2
OF_NOTEBOOKS = ("FORCE_COLOR", "CLICOLOR_FORCE", "MPLBACKEND")
"""Variables that Jupyter sets for its kernel, and that are wrong for a process without a screen."""


class RunResults:
    """The results of a run, as far as its folder has them."""

    def __init__(self, folder: Path, replaced: int | None = None) -> None:
        self.folder = folder
        self._directory = RunDirectory(folder)
        self._replaced = replaced
        """Inode of a folder that the run replaces; until then it has no results."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.folder.name}: {self.status}>"

    @property
    def status(self) -> str:
        """Running, done, failed, interrupted or killed."""
        return self._directory.status()

    @property
    def summary(self) -> dict[str, Any]:
        """The content of `summary.json`; empty before the first one."""
        return self._directory.summary() if self._has_folder() else {}

    def rows(self, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
        """Return the records of a JSON-lines file: of `metrics.jsonl` one for each batch."""
        return self._directory.rows(file) if self._has_folder() else []

    def table(self, file: str = "metrics.jsonl") -> pyarrow.Table:
        """Return these records as a table, with a column for every key that one of them has."""
        rows = self.rows(file)
        names = dict.fromkeys(name for row in rows for name in row)
        return pyarrow.table({name: [row.get(name) for row in rows] for name in names})

    def _has_folder(self) -> bool:
        with suppress(FileNotFoundError):
            return self.folder.stat().st_ino != self._replaced
        return False


class TrainingRun(RunResults):
    """A run whose process this one has started.

    It is stopped, as by Ctrl-C, when this Python process exits. One that is killed leaves it
    running: `results` finds it by its name. If the command itself is killed, its session goes on,
    and so do the calls here; `status` is that of the folder from then on.
    """

    def __init__(self, folder: Path, commands: list[list[str]], replaced: int | None) -> None:
        super().__init__(folder, replaced)
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  (open as long as the run)
        *before, last = [shlex.join(command) for command in commands]
        self._process = subprocess.Popen(
            ["sh", "-c", " && ".join([*before, f"exec {last}"])],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env={name: value for name, value in os.environ.items() if name not in OF_NOTEBOOKS},
            start_new_session=True,
        )
        atexit.register(self.stop)

    @property
    def status(self) -> str:
        """Running, done, failed or interrupted; killed, if all of its processes were."""
        code = self._process.poll()
        if code is None:
            return "running"
        if code == -signal.SIGKILL and self._has_folder():
            return super().status if self._directory.lock.rests() else "running"
        return {0: "done", **dict.fromkeys(INTERRUPTED, "interrupted")}.get(code, "failed")

    def lines(self) -> Iterator[str]:
        """Yield what the command prints, from its beginning until it ends."""
        position, partial = 0, b""
        for _ in self._looks():
            while data := os.pread(self._output.fileno(), 65_536, position):
                position += len(data)
                *whole, partial = (partial + data).split(b"\n")
                yield from (line.decode(errors="replace") for line in whole)
        if partial:
            yield partial.decode(errors="replace")

    def metrics(self) -> Iterator[dict[str, Any]]:
        """Yield the statistics of each batch, as it is trained, until the run ends."""
        shown = 0
        for _ in self._looks():
            rows = self.rows()
            yield from rows[shown:]
            shown = len(rows)

    def _looks(self) -> Iterator[None]:
        """Yield at intervals until the run has ended, and once more then."""
        while self.status == "running":
            yield
            time.sleep(POLL_SECONDS)
        yield

    def stop(self) -> None:
        """Stop the run as Ctrl-C does, after a checkpoint; a second call does not wait for that."""
        if self._process.poll() in (None, -signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGINT)

    def wait(self, timeout: float | None = None) -> dict[str, Any]:
        """Wait for the end and return the summary, that of an interrupted run too.

        Raises TimeoutError if the run goes on after `timeout` seconds, InputError if the recipe
        cannot be trained, and RunFailed if the run failed.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        for _ in self._looks():
            if time.monotonic() >= deadline and self.status == "running":
                raise TimeoutError(f"{self.folder.name} goes on after {timeout} s")
        if self.status in ("done", "interrupted"):
            return self.summary
        code = self._process.returncode
        _, printed, message = "\n".join(["", *self.lines()]).rpartition("\nheadway: ")
        if not printed:
            last = message.strip().rpartition("\n")[2] or "it printed nothing"
            raise RunFailed(f"{self.folder.name} ended with exit code {code}: {last}")
        raise (InputError if code == InputError.exit_code else RunFailed)(message.strip())


def run(
    recipe: str | Path, overrides: Mapping[str, Any] | None = None, *, replace: bool = False
) -> TrainingRun:
    """Start training a recipe, and return at once; missing models are trained first.

    Raises InputError if the recipe is not valid.

    Args:
        recipe: A TOML file, or the name of a shipped recipe or preset. Modules that it names are
            imported from the working directory.
        overrides: Values of keys, as {"learner.learning_rate": 1e-4, "queues": {"window": 32}}.
        replace: Delete a run of the same name first.
    """
    settings = list(override_settings(overrides or {}))
    with _importing_from_here():
        config = load_recipe(str(recipe), settings)
    arguments = [str(recipe), *_options(settings)]
    commands = [[*COMMAND, command, *arguments] for command in preparations(config)]
    commands.append([*COMMAND, "run", *arguments, *(["--replace"] if replace else [])])
    folder = RunDirectory.of(config).path
    return TrainingRun(folder, commands, folder.stat().st_ino if folder.exists() else None)


def resume(
    run: str, runs_dir: str | Path = "runs", *, overrides: Mapping[str, Any] | None = None
) -> TrainingRun:
    """Resume a run, named by its folder or its name in `runs_dir`, and return at once.

    `overrides` are values of keys from now on, as of `run`, such as {"steps": 200}. Raises
    InputError if there is no such run, or it cannot go on with a value.
    """
    directory = RunDirectory.open(run, Path(runs_dir))
    settings = list(override_settings(overrides or {}))
    with _importing_from_here():
        resumed_recipe(directory, settings)
    command = [*COMMAND, "resume", str(directory.path), *_options(settings)]
    return TrainingRun(directory.path, [command], None)


def results(run: str, runs_dir: str | Path = "runs") -> RunResults:
    """Return the results of a run that anybody started, by its folder or name."""
    return RunResults(RunDirectory.open(run, Path(runs_dir)).path)


def _options(settings: Sequence[str]) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


@contextmanager
def _importing_from_here() -> Iterator[None]:
    """Let recipes name modules in the working directory, as commands do."""
    before = list(sys.path)
    sys.path.append(os.getcwd())
    try:
        yield
    finally:
        sys.path[:] = before


def preparations(config: RunConfig) -> Iterator[str]:
    """Yield the commands that make what a recipe starts from, as far as it is missing."""
    if config.sft is not None and not (config.warm_start / "config.json").exists():
        yield "sft"
    if config.prefer is not None and not (config.preferred / "config.json").exists():
        yield "prefer"
    learned = config.actors.asks_reward_models and not config.actors.reward_model.named
    if learned and not config.reward_models.exists():
        yield "reward-model"


def override_settings(
    overrides: Mapping[str, Any], model: Any = RunConfig, prefix: str = ""
) -> Iterator[str]:
    """Yield overrides as `key=value` with TOML values; a section is a mapping of its keys."""
    for key, value in overrides.items():
        inner = model
        for part in key.split("."):
            inner = section_of(inner, part) if inner is not None else None
        if value is None:
            raise InputError(f"{prefix}{key} = None: leave out what is not to be set")
        if inner is not None and isinstance(value, Mapping):
            yield from override_settings(value, inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={toml_value(value)}"

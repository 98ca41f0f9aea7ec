"""Processes of a benchmark: measurements one after the other, with progress."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.progress import Progress

from benchmarks.harness.provenance import environment
from deploy.config.run_config import RunConfig
from deploy.errors import RunFailed
from deploy.storage.run_directory import RunDirectory

ENVIRONMENT = ".environment.json"
"""Ending of the file beside an arm's folder that says what it was measured with and on."""
STOP_SECONDS = 40.0
POLL_SECONDS = 0.5


class Children:
    """Runs measurements one after the other and shows how far they are."""

    def __init__(self, out: Path, progress: Progress, total: int) -> None:
        self._out, self._progress = out, progress
        self._task = progress.add_task("", total=total)
        self._seconds: list[float] = []
        self._left = total

    def run(self, label: str, kind: str, config: RunConfig, *recorded: Path) -> RunDirectory:
        """One measurement by `async_arm`, to its end.

        Args:
            label: For the terminal.
            kind: train, actors or learner.
            config: Its recipe.
            recorded: For a learner: the run that it trains again.

        Returns:
            What it left behind.

        Raises:
            RunFailed: It failed; names its log.
        """
        recipe = self._recipe(config)
        return self._to_the_end(
            label, config, ["benchmarks.loop.async_arm", kind, recipe, *recorded]
        )

    def run_module(
        self, label: str, module: str, config: RunConfig, *how: str, variables: dict[str, str]
    ) -> RunDirectory:
        """One measurement by another module, which is given the recipe's file and `how`.

        Args:
            label: For the terminal.
            module: Of `benchmarks`.
            config: Its recipe.
            how: Its other arguments.
            variables: Of the environment, beside those of this process.

        Returns:
            What it left behind.

        Raises:
            RunFailed: It failed; names its log.
        """
        return self._to_the_end(label, config, [module, self._recipe(config), *how], variables)

    def _recipe(self, config: RunConfig) -> Path:
        file = self._out / f"{config.name}.json"
        file.write_text(config.model_dump_json(indent=2))
        return file

    def _to_the_end(
        self,
        label: str,
        config: RunConfig,
        arguments: Sequence[Any],
        variables: Mapping[str, str] | None = None,
    ) -> RunDirectory:
        log = self._out / f"{config.name}.log"
        facts = json.dumps(environment(), indent=2)
        (self._out / f"{config.name}{ENVIRONMENT}").write_text(facts)
        directory = RunDirectory(self._out / config.name)
        command = [sys.executable, "-m", *arguments]
        began = time.monotonic()
        if not self._progress.console.is_terminal:
            self._progress.console.print(f"{datetime.now():%H:%M:%S}  {label}")
        with log.open("w") as file, child(command, file, variables) as process:
            while process.poll() is None:
                self._show(label, config.steps, directory)
                time.sleep(POLL_SECONDS)
        if process.returncode:
            raise RunFailed(
                f"{label} ended with exit code {process.returncode}: {last_words(log)}\n"
                f"its log is {log}"
            )
        self._seconds.append(time.monotonic() - began)
        self._left -= 1
        self._progress.advance(self._task)
        return directory

    def skip(self) -> None:
        """One measurement is there already."""
        self._left -= 1
        self._progress.advance(self._task)

    def _show(self, label: str, steps: int, directory: RunDirectory) -> None:
        rows = directory.path / "metrics.jsonl"
        done = rows.read_bytes().count(b"\n") if rows.exists() else 0
        phase = f"step {done}/{steps}" if done else "starting"
        left = "time left: known after the first"
        if self._seconds:
            left = f"about {self._left * fmean(self._seconds) / 60:.0f} min left"
        self._progress.update(self._task, description=f"{label} · {phase} · {left}")


@contextmanager
def child(
    command: list[Any], output: Any, variables: Mapping[str, str] | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that ends with the block; Ctrl-C reaches it through us, once."""
    process = subprocess.Popen(
        command,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={**os.environ, **(variables or {})},
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def last_words(log: Path) -> str:
    """The last line that a process wrote into its log."""
    return (log.read_text().strip().splitlines() or ["it said nothing"])[-1]


def read_environment(out: Path, config: RunConfig) -> dict[str, Any] | None:
    """What an arm was measured with and on; None where it was not written down."""
    file = out / f"{config.name}{ENVIRONMENT}"
    return json.loads(file.read_text()) if file.exists() else None

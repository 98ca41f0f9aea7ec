"""Processes that a benchmark starts and ends."""

import os
import signal
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from deploy.errors import RunFailed

STOP_SECONDS = 40.0
CLI = ("-c", "from deploy.cli import main; main()")
"""Arguments of Python that run the command `headway`."""


def set_options(settings: Iterable[str]) -> list[str]:
    """Return settings KEY=VALUE of a recipe as options of a command."""
    return [word for setting in settings for word in ("--set", setting)]


def start(
    command: Sequence[Any],
    output: Any,
    variables: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> "subprocess.Popen[bytes]":
    """Start a process in a session of its own; `variables` are added to its environment."""
    return subprocess.Popen(
        command,
        stdout=output,
        stderr=subprocess.STDOUT if output is not None else None,
        start_new_session=True,
        env={**os.environ, **(variables or {})},
        cwd=cwd,
    )


@contextmanager
def child(
    command: Sequence[Any], output: Any, variables: Mapping[str, str] | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a process; interrupt it when the block ends."""
    process = start(command, output, variables)
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


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and of all below it so far."""
    root, total = psutil.Process(pid), 0.0
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:2])
    return total


def run_to_end(what: str, command: Sequence[Any], log: Path) -> None:
    """Run a process to its end, with its output added to a log.

    Raises:
        RunFailed: Its exit code is not 0.
    """
    with log.open("a") as file, child(command, file) as process:
        process.wait()
    raise_failure(what, process.returncode, log)


def raise_failure(what: str, code: int, log: Path) -> None:
    """Raise `RunFailed` with the last line of a log unless an exit code is 0."""
    if code:
        last = (log.read_text().strip().splitlines() or ["(no output)"])[-1]
        raise RunFailed(f"{what} ended with exit code {code}: {last}\nits log is {log}")

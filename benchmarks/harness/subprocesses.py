"""Processes that a benchmark starts and ends."""

import multiprocessing
import os
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from deploy.errors import RunFailed

T = TypeVar("T")
STOP_SECONDS = 40.0
CLI = ("-c", "from deploy.cli import main; main()")
"""Arguments of Python that run the command `headway`."""


def set_options(settings: Iterable[str]) -> list[str]:
    """Return settings KEY=VALUE of a recipe as options of a command."""
    return [word for setting in settings for word in ("--set", setting)]


def call_in_process(function: Callable[..., T], *arguments: Any, seconds: float | None = None) -> T:
    """Call a function in a process of its own.

    Raises:
        TimeoutError: It took longer than `seconds`; the process is killed.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        try:
            return pool.submit(function, *arguments).result(seconds)
        except TimeoutError:
            for process in multiprocessing.active_children():
                process.kill()
            raise


@contextmanager
def child(
    command: Sequence[Any], output: Any, variables: Mapping[str, str] | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a process in a session of its own; interrupt it when the block ends."""
    process = subprocess.Popen(
        command,
        stdout=output,
        stderr=subprocess.STDOUT if output is not None else None,
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

"""Processes that a benchmark starts, follows and ends, and how each of them begins."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NoReturn

from deploy.errors import Interrupted, RunFailed
from deploy.runtime.console import Terminal
from headway.errors import HeadwayError, InputError

STOP_SECONDS = 40.0
POLL_SECONDS = 1.0
"""Interval between two looks at the progress of a process."""
MESSAGE = "headway: "
"""Beginning of an error message of a command."""
CLI = ("-c", "from deploy.cli import main; main()")
"""Arguments of Python that run the command `headway`."""


def run_main(main: Callable[[], int | None]) -> NoReturn:
    """Run the main function of a process and end the process with its exit code.

    As by `headway run`, expected errors are one message, and modules of the user in the working
    folder can be imported.
    """
    sys.path.append(os.getcwd())
    try:
        sys.exit(main())
    except (KeyboardInterrupt, SystemExit) as leaving:  # typer turns the first into the second
        if isinstance(leaving, SystemExit) and leaving.code != Interrupted.exit_code:
            raise
        print(f"{MESSAGE}stopped by the user", file=sys.stderr)
        sys.exit(Interrupted.exit_code)
    except HeadwayError as error:
        print(f"{MESSAGE}{error}", file=sys.stderr)
        sys.exit(error.exit_code)


def set_options(settings: Iterable[str]) -> list[str]:
    """Return settings KEY=VALUE of a recipe as options of a command."""
    return [word for setting in settings for word in ("--set", setting)]


@contextmanager
def child(command: Sequence[Any], output: Any, errors: Any) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a process in a session of its own, with files for its output and errors; None: ours.

    It is interrupted when the block ends.
    """
    process = subprocess.Popen(command, stdout=output, stderr=errors, start_new_session=True)
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


@contextmanager
def local_ray(cores: int) -> Iterator[None]:
    """Run a Ray cluster on this machine during the block."""
    import ray

    ray.init("local", num_cpus=cores, include_dashboard=False, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


def raise_failure(what: str, code: int, log: Path) -> None:
    """Raise the error that a process ended with, unless its exit code is 0.

    Raises:
        InputError: The exit code is 2; with the message of the process.
        RunFailed: It is another; with the last line of the log.
    """
    if not code:
        return
    text = log.read_text(errors="replace").strip()
    if code == InputError.exit_code and MESSAGE in text:
        raise InputError(text.rpartition(MESSAGE)[2])
    last = (text.splitlines() or ["(no output)"])[-1]
    raise RunFailed(f"{what} ended with exit code {code}: {last}\nits log is {log}")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The steps of a process, and the processes before and after it."""

    label: str
    """Name of the process in its bar and in messages."""
    title: str
    """Text that is printed at its start."""
    lines: Path
    """File to which the process writes a line for each step."""
    total: int
    finished: Sequence[float] = ()
    """Seconds of each process that ran before."""
    further: int = 0
    """Number of processes after it."""

    def done(self) -> int:
        """Return the number of finished steps."""
        return self.lines.read_bytes().count(b"\n") if self.lines.exists() else 0

    def describe(self, done: int, elapsed: float) -> str:
        """Describe the time left until all processes have ended, after some steps and seconds."""
        if done:
            whole = elapsed * self.total / done
        elif self.finished:
            whole = max(elapsed, fmean(self.finished))
        else:
            return "time left: known after the first step"
        left = whole - elapsed + self.further * fmean([*self.finished, whole])
        return f"about {left / 60:.0f} min left" if left >= 90 else f"about {left:.0f} s left"


def run_with_progress(command: Sequence[Any], log: Path, progress: Progress) -> float:
    """Run a process, show its progress, return its seconds; raises as `raise_failure`."""
    terminal, began, shown = Terminal(), time.monotonic(), 0
    terminal.say(f"{progress.title} · {progress.describe(0, 0.0)}")
    with (
        log.open("w") as file,
        child(command, file, file) as process,
        terminal.bar(progress.total, progress.label),
    ):
        while process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(POLL_SECONDS)
            if (done := progress.done()) != shown:
                shown = done
                left = progress.describe(done, time.monotonic() - began)
                terminal.advance(done, f"{progress.label} · {left}")
    raise_failure(progress.label, process.returncode, log)
    return time.monotonic() - began

"""Progress of a process that writes a line for each of its steps, and the time left."""

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.harness.subprocesses import child, raise_failure
from deploy.runtime.console import Terminal

POLL_SECONDS = 1.0
"""Interval between two looks at the progress of a process."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The steps of a process, and the processes before and after it."""

    label: str
    """Name of the process in its bar and in messages."""
    title: str
    """Text that is printed at its start."""
    lines: Path
    """File with a line for each step."""
    total: int
    finished: Sequence[float] = ()
    """Seconds of each process that ran before."""
    further: int = 0
    """Number of processes after it."""

    def describe(self, done: int, elapsed: float) -> str:
        """Describe the time left after some steps."""
        left = seconds_left(self.finished, self.further, elapsed=elapsed, share=done / self.total)
        return describe_seconds(left)


def run_with_progress(
    command: Sequence[Any],
    log: Path,
    progress: Progress,
    variables: Mapping[str, str] | None = None,
) -> float:
    """Run a process to its end, show its progress, and return its seconds.

    Raises:
        InputError: It refused its input; with its message.
        RunFailed: It failed; names its log.
    """
    terminal, began = Terminal(), time.monotonic()
    terminal.say(f"{progress.title} · {progress.describe(0, 0.0)}")

    def show(done: int) -> None:
        left = progress.describe(done, time.monotonic() - began)
        terminal.advance(done, f"{progress.label} · {left}")

    with (
        log.open("w") as file,
        child(command, file, variables) as process,
        terminal.bar(progress.total, progress.label),
    ):
        follow(process, lambda: count_lines(progress.lines), show)
    raise_failure(progress.label, process.returncode, log)
    return time.monotonic() - began


def follow(
    process: "subprocess.Popen[bytes]", count: Callable[[], int], show: Callable[[int], None]
) -> None:
    """Wait for the end of a process, and show a count whenever it has changed.

    Args:
        process: What is waited for.
        count: Returns how much it has done.
        show: Called with the count.
    """
    shown = 0
    while True:
        with suppress(subprocess.TimeoutExpired):
            process.wait(POLL_SECONDS)
            return
        if (done := count()) != shown:
            shown = done
            show(done)


def count_lines(file: Path) -> int:
    """Return the number of complete lines of a file; 0 without it."""
    return file.read_bytes().count(b"\n") if file.exists() else 0


def seconds_left(
    finished: Sequence[float], further: int, *, elapsed: float, share: float
) -> float | None:
    """Estimate the seconds until all runs are finished.

    Args:
        finished: Seconds that each finished run took.
        further: Number of runs after the present one.
        elapsed: Seconds since the start of the present run.
        share: Part of the present run that is done, from 0 to 1.

    Returns:
        None where nothing is known yet.
    """
    if share > 0:
        whole = elapsed / share
    elif finished:
        whole = max(elapsed, fmean(finished))
    else:
        return None
    return whole - elapsed + further * fmean([*finished, whole])


def describe_seconds(left: float | None) -> str:
    """Describe an estimate of `seconds_left`."""
    if left is None:
        return "time left: known after the first step"
    return f"about {left / 60:.0f} min left" if left >= 90 else f"about {left:.0f} s left"

"""Processes that a benchmark starts, follows and ends, and how each of them begins."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from deploy.errors import Interrupted, RunFailed
from headway.errors import HeadwayError, InputError

STOP_SECONDS = 40.0
MESSAGE = "headway: "
"""Beginning of an error message of a command."""
CLI = ("-c", "from deploy.cli import main; main()")
"""Arguments of Python that run the command `headway`."""


def run_main(main: Callable[[], int | None]) -> NoReturn:
    """Run the main function of a process and end the process with its exit code.

    Modules of the user are imported from the folder that the process runs in, after everything
    installed, and expected errors are one message, both as by `headway run`.
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


def start(
    command: Sequence[Any],
    output: Any,
    variables: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    errors: Any = None,
) -> "subprocess.Popen[bytes]":
    """Start a process in a session of its own.

    Args:
        command: Program and arguments.
        output: File of its output; None: that of this process.
        variables: Environment variables that are added.
        cwd: Its folder; None: that of this process.
        errors: File of its standard error; None: the same as `output`.
    """
    return subprocess.Popen(
        command,
        stdout=output,
        stderr=errors or (subprocess.STDOUT if output is not None else None),
        start_new_session=True,
        env={**os.environ, **(variables or {})},
        cwd=cwd,
    )


@contextmanager
def child(
    command: Sequence[Any],
    output: Any,
    variables: Mapping[str, str] | None = None,
    errors: Any = None,
) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a process; interrupt it when the block ends."""
    process = start(command, output, variables, errors=errors)
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
    import psutil  # here alone: benchmarks of a GPU do without

    root, total = psutil.Process(pid), 0.0
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:2])
    return total


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

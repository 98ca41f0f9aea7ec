"""The tool `python`: programs that the policy writes, run in the sandbox of `actors.sandbox`."""

import os
import threading
from collections.abc import Callable

from actors.sandbox import Sandbox

_AT_ONCE = threading.BoundedSemaphore(2 * (os.cpu_count() or 1))
"""Sandboxes of an actor; more would only share the same cores."""


def python_tool(seconds: float) -> Callable[[str], str]:
    """The tool; the policy gives it a program, and has no say in the limit of `seconds`."""

    def python(program: str) -> str:
        return run_python(program, seconds=seconds)

    python.__doc__ = run_python.__doc__
    return python


def run_python(program: str, *, seconds: float) -> str:
    """What a program of Python's standard library prints, and how it failed where it did.

    Args:
        program: Source text.
        seconds: Its limit.

    Raises:
        InputError: There is no sandbox on this machine; nothing was run.
    """
    with _AT_ONCE:
        outcome = Sandbox(seconds=seconds).run(program)
    if (outcome.ended, outcome.code) == ("exit", 0):
        return outcome.stdout
    said = outcome.stderr.strip().rpartition("\n")[2]
    how = {"timeout": f"stopped after {seconds:g} s", "output": "stopped: it printed too much"}
    return f"{outcome.stdout}error: {how.get(outcome.ended) or said or outcome.ended}"

"""The tool `python`, which runs programs of the policy in the sandbox of `actors.sandbox`."""

import os
import threading
from collections.abc import Callable

from actors.sandbox import Sandbox

_CONCURRENT = threading.BoundedSemaphore(2 * (os.cpu_count() or 1))
"""Sandboxes that one actor runs at once; more would only share the same cores."""


def python_tool(seconds: float) -> Callable[[str], str]:
    """Return the tool, whose time limit of `seconds` the policy cannot change."""

    def python(program: str) -> str:
        return run_python(program, seconds=seconds)

    python.__doc__ = run_python.__doc__
    return python


def run_python(program: str, *, seconds: float) -> str:
    """Run a program of Python's standard library; return its output, and its error if it failed.

    Raises:
        InputError: There is no sandbox on this machine; nothing was run.
    """
    with _CONCURRENT:
        outcome = Sandbox(seconds=seconds).run(program)
    if (outcome.ended, outcome.code) == ("exit", 0):
        return outcome.stdout
    last_line = outcome.stderr.strip().rpartition("\n")[2]
    limits = {"timeout": f"stopped after {seconds:g} s", "output": "stopped: it printed too much"}
    return f"{outcome.stdout}error: {limits.get(outcome.ended) or last_line or outcome.ended}"

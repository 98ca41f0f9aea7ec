"""Lists of CPU cores as recipes write them, and the binding of a process to such cores."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from headway.errors import InputError

CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")
"""The limit of a container's CPU time, in cgroup version 2."""


def parse_cores(text: str) -> list[int]:
    """Return the core numbers of a list such as "0,2-5", ascending and without duplicates.

    A descending range such as "5-2" names no cores.
    """
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return sorted(cores)


def usable_cores(limit: Path = CPU_LIMIT) -> list[int]:
    """Return the cores of this process, no more than its container may keep busy at once.

    `limit` holds microseconds of CPU time, or "max", and the period that they are for.
    """
    cores = sorted(os.sched_getaffinity(0))
    try:
        quota, period = limit.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else cores[: max(1, int(quota) // int(period))]


def bind_process(cores: list[int], setting: str) -> None:
    """Bind all threads of this process to cores; raise InputError by `setting` if one is absent."""
    available = os.sched_getaffinity(0)
    if not available.issuperset(cores):
        raise InputError(f"{setting} names {cores}, but there are only {sorted(available)}")
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # the thread has ended in the meantime
            os.sched_setaffinity(int(thread), cores)


def _check_ranges(text: str) -> str:
    for part in text.split(","):
        if not parse_cores(part):
            raise ValueError(f"{part!r} is empty; a range begins with its first core")
    return text


Cores = Annotated[str, Field(pattern=r"^\d+(-\d+)?(,\d+(-\d+)?)*$"), AfterValidator(_check_ranges)]
"""CPU cores, as "0", "2-5" or "2-5,8"."""

"""Lists of CPU cores, as recipes write them, and a process on some of them."""

import os
from contextlib import suppress
from typing import Annotated

from pydantic import AfterValidator, Field

from actors.errors import InputError


def cores_of(text: str) -> list[int]:
    """Core numbers of a list such as "0,2-5", ascending, each once."""
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return sorted(cores)


def bind(cores: list[int], setting: str) -> None:
    """Keeps every thread of this process, and those it will start, on some cores.

    Args:
        cores: Core numbers.
        setting: Name of the setting that asks for them.

    Raises:
        InputError: This machine does not have them.
    """
    there = os.sched_getaffinity(0)
    if not there.issuperset(cores):
        raise InputError(f"{setting} names {cores}, but there are only {sorted(there)}")
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread), cores)


def _forwards(text: str) -> str:
    for part in text.split(","):
        if not cores_of(part):
            raise ValueError(f"{part!r} is empty; a range begins with its first core")
    return text


Cores = Annotated[str, Field(pattern=r"^\d+(-\d+)?(,\d+(-\d+)?)*$"), AfterValidator(_forwards)]
"""CPU cores, as "0", "2-5" or "2-5,8"."""

"""Which cores and threads a rank of the learner has. Pure but for `bind`."""

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from learner.errors import InputError

if TYPE_CHECKING:
    from learner.config.learner import LearnerConfig


def cores_of(text: str) -> list[int]:
    """Core numbers of a list such as "0,2-5", ascending, each once; none of a range like "5-2"."""
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return sorted(cores)


def cores_of_rank(config: "LearnerConfig", rank: int) -> list[int] | None:
    """The cores of one rank: an equal share, or all where there are fewer cores than ranks.

    Returns:
        Ascending core numbers; None where the recipe names none.

    Example:
        >>> cores_of_rank(LearnerConfig(cores="0-3", ranks=2), rank=1)
        [2, 3]
    """
    if config.cores is None:
        return None
    cores = cores_of(config.cores)
    if len(cores) < config.ranks:
        return cores
    share = len(cores) // config.ranks  # without a rest: `LearnerConfig` sees to it
    return cores[rank * share : (rank + 1) * share]


def threads_of(config: "LearnerConfig") -> int:
    """Torch threads of one rank."""
    return config.threads or len(cores_of_rank(config, 0) or [0])


def cpus_of(config: "LearnerConfig") -> float:
    """CPUs that one rank reserves: one a thread, or its part of cores that ranks have in common."""
    threads = threads_of(config)
    there = len(cores_of(config.cores)) if config.cores else threads * config.ranks
    return min(float(threads), there / config.ranks)


def bind(cores: list[int]) -> None:
    """Keeps every thread of this process, and those it will start, on some cores.

    Raises:
        InputError: This machine does not have them.
    """
    try:
        for thread in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):  # it ended meanwhile
                os.sched_setaffinity(int(thread), cores)
    except OSError:
        there = sorted(os.sched_getaffinity(0))
        raise InputError(f"learner.cores = {cores}, but there are only {there}") from None

"""The cores and threads of each rank of the learner."""

from typing import TYPE_CHECKING

from queues.runtime.cpu_affinity import parse_cores

if TYPE_CHECKING:
    from learner.config.learner import LearnerConfig


def cores_of_rank(config: "LearnerConfig", rank: int) -> list[int] | None:
    """Return the cores of one rank: an equal share, or all if there are fewer cores than ranks.

    They ascend; None if the recipe names no cores.
    """
    if config.cores is None:
        return None
    cores = parse_cores(config.cores)
    if len(cores) < config.ranks:
        return cores
    share = len(cores) // config.ranks  # without a remainder, as `LearnerConfig` checks
    return cores[rank * share : (rank + 1) * share]


def threads_of(config: "LearnerConfig") -> int:
    """Return the torch threads of one rank."""
    return config.threads or len(cores_of_rank(config, 0) or [0])


def cpus_of(config: "LearnerConfig") -> float:
    """Return the CPUs that one rank reserves: one a thread, or its part of shared cores."""
    threads = threads_of(config)
    available = len(parse_cores(config.cores)) if config.cores else threads * config.ranks
    return min(float(threads), available / config.ranks)

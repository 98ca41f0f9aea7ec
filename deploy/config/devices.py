"""Defaults from this machine: GPUs where a recipe names none, and the dtype on GPUs."""

import os
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from deploy.config.run_config import RunConfig

DRIVER = Path("/proc/driver/nvidia/gpus")
"""A folder of the NVIDIA driver with an entry for each GPU."""
EPSILON = 1e-6
"""Tolerance of sums of shares."""


def for_this_machine(config: RunConfig) -> RunConfig:
    """Return a recipe with GPUs and dtypes of this machine where it names none."""
    config = with_dtype(with_gpus(config, visible_gpus()))
    return with_offload_threads(config, len(os.sched_getaffinity(0)))


def visible_gpus(driver: Path = DRIVER) -> int:
    """Return the number of NVIDIA GPUs for processes started here; 0 with vLLM's build for CPUs."""
    try:
        distribution("vllm")
    except PackageNotFoundError:
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device not in ("", "-1")])
    return len(list(driver.iterdir())) if driver.is_dir() else 0


def left_on_cards(shares: Iterable[float], parts: Iterable[float] = ()) -> list[float]:
    """Return the free part of each GPU that shares of at most 1 take, of `parts` of GPUs first.

    A share lies on one GPU, the fullest that has it free, as Ray chooses it.
    """
    free = list(parts)
    for share in sorted(shares, reverse=True):
        fullest = min((part for part in free if part + EPSILON >= share), default=None)
        if fullest is None:
            free.append(1.0 - share)
        else:
            free[free.index(fullest)] -= share
    return free


def with_gpus(config: RunConfig, available: int) -> RunConfig:
    """Fill in `actors.gpus` and `learner.gpus` for a run on this machine.

    Every rank and every worker of an engine gets a GPU of its own, or half of a single one where
    there are only two of them. A recipe that names either key is returned as it is, and so is one
    for which the `available` GPUs are too few.
    """
    actors, learner = config.actors, config.learner
    given = "gpus" in actors.model_fields_set | learner.model_fields_set
    if given or not available or actors.engine != "vllm" or config.deploy.ray_address != "local":
        return config
    workers = actors.count * actors.tensor_parallel_size
    if learner.ranks + workers <= available:
        shares = 1.0, float(actors.tensor_parallel_size)
    elif learner.ranks == workers == available == 1:
        shares = 0.5, 0.5
    else:
        return config
    return config.updated(learner={"gpus": shares[0]}, actors={"gpus": shares[1]})


def with_dtype(config: RunConfig) -> RunConfig:
    """Fill in bfloat16 for a learner on GPUs and its engines, where a recipe names no dtype.

    It is returned as it is with `[model.tiny]`, whose weights are float32, and with
    `learner.zero_stage` = 0, which trains in float32 alone.
    """
    actors, learner = config.actors, config.learner
    named = "dtype" in actors.model_fields_set | learner.model_fields_set
    if named or not learner.gpus or not learner.zero_stage or config.model.tiny is not None:
        return config
    return config.updated(learner={"dtype": "bfloat16"}, actors={"dtype": "bfloat16"})


def with_offload_threads(config: RunConfig, cores: int) -> RunConfig:
    """Fill in `learner.threads` for a learner on GPUs whose optimizer steps on the CPU.

    Its ranks share half of the machine's `cores`. A recipe that names threads or cores, runs on
    another cluster, or keeps the optimizer's state on the GPUs is returned as it is.
    """
    learner = config.learner
    named = (learner.threads, learner.cores) != (None, None)
    offloads = learner.gpus and learner.offload_optimizer
    if named or not offloads or config.deploy.ray_address != "local":
        return config
    return config.updated(learner={"threads": max(1, cores // 2 // learner.ranks)})

"""Defaults from this machine: GPUs where a recipe names none, dtype and threads with them."""

import os
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from deploy.config.run_config import RunConfig

DRIVER = Path("/proc/driver/nvidia/gpus")
"""A folder of the NVIDIA driver with an entry for each GPU."""
EPSILON = 1e-6
"""Tolerance of sums of shares."""


def for_this_machine(
    config: RunConfig, *, gpus: int | None = None, cores: int | None = None
) -> RunConfig:
    """Return a recipe with GPUs, dtypes and threads of this machine where it names none.

    `gpus` and `cores` are those of the machine; None counts them.
    """
    shares = _gpus(config, visible_gpus() if gpus is None else gpus)
    of_rank = config.learner.gpus if shares is None else shares[0]
    learner: dict[str, Any] = {}
    actors: dict[str, Any] = {}
    if shares is not None:
        learner["gpus"], actors["gpus"] = shares
    own, named = config.learner, config.actors.model_fields_set | config.learner.model_fields_set
    # Tiny models and stage 0 train in float32 alone.
    if "dtype" not in named and of_rank > 0 and own.zero_stage > 0 and config.model.tiny is None:
        learner["dtype"] = actors["dtype"] = "bfloat16"
    steps_here = of_rank > 0 and own.offload_optimizer and config.deploy.ray_address == "local"
    if steps_here and (own.threads, own.cores) == (None, None):
        available = len(os.sched_getaffinity(0)) if cores is None else cores
        learner["threads"] = max(1, available // 2 // own.ranks)
    return config.updated(learner=learner, actors=actors) if learner else config


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


def _gpus(config: RunConfig, available: int) -> tuple[float, float] | None:
    """Return the GPUs of a rank and of an engine, where a recipe names none and there are enough.

    Every rank and every worker of an engine gets a GPU of its own, or half of the only one.
    """
    actors, learner = config.actors, config.learner
    given = "gpus" in actors.model_fields_set | learner.model_fields_set
    if given or not available or actors.engine != "vllm" or config.deploy.ray_address != "local":
        return None
    workers = actors.count * actors.tensor_parallel_size
    if learner.ranks + workers <= available:
        return 1.0, float(actors.tensor_parallel_size)
    return (0.5, 0.5) if learner.ranks == workers == available == 1 else None

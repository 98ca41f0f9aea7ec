"""Defaults from this machine: GPUs where a recipe names none, dtype and threads with them."""

import os
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from actors.engines.model_folder import served_dtype
from deploy.config.run_config import RunConfig
from headway.errors import InputError

DRIVER = Path("/proc/driver/nvidia/gpus")
"""A folder of the NVIDIA driver with an entry for each GPU."""
EPSILON = 1e-6
"""Tolerance of sums of shares."""
SMALL = 100_000_000
"""Bytes of weights below which a CPU computes in float32: its caches hold a good part of them."""


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
    own = config.learner
    if (dtype := dtype_here(config, on_gpu=of_rank > 0)) is not None:
        learner["dtype"] = actors["dtype"] = dtype
    steps_here = of_rank > 0 and own.offload_optimizer and config.deploy.ray_address == "local"
    if steps_here and (own.threads, own.cores) == (None, None):
        available = len(os.sched_getaffinity(0)) if cores is None else cores
        learner["threads"] = max(1, available // 2 // own.ranks)
    return config.updated(learner=learner, actors=actors) if learner else config


def dtype_here(config: RunConfig, *, on_gpu: bool) -> str | None:
    """Return the dtype of learner and engines by the rule of learner.dtype; None: the recipe's.

    Raises InputError if `auto` has to read a model that is not here.
    """
    learner, actors, path = config.learner, config.actors, config.model.path
    is_auto, named = learner.dtype == "auto", learner.model_fields_set | actors.model_fields_set
    if not is_auto and ("dtype" in named or not on_gpu):
        return None
    if is_auto and actors.dtype != "auto":
        return actors.dtype
    if path is None or learner.zero_stage == 0:
        return "float32" if is_auto else None
    if on_gpu:
        return "bfloat16"
    folder = Path(path).expanduser()
    if 0 < sum(file.stat().st_size for file in folder.glob("*.safetensors")) < SMALL:
        return "float32"
    try:
        own = served_dtype(str(folder) if folder.is_dir() else path, "auto")
    except InputError as error:
        raise InputError(f'learner.dtype = "auto": {error}; or name a dtype') from error
    return "bfloat16" if own == "bfloat16" else "float32"


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

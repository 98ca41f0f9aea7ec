"""Defaults from this machine: GPUs where a recipe names none, dtype and threads with them."""

import os
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from actors.engines.model_folder import served_dtype
from deploy.config.run_config import RunConfig
from headway.errors import InputError
from learner.config.learner import LearnerConfig
from learner.config.supervised import SupervisedConfig

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
    changes: dict[str, dict[str, Any]] = dtypes_here(config, on_gpu=of_rank > 0)
    learner, actors = (changes.setdefault(name, {}) for name in ("learner", "actors"))
    if shares is not None:
        learner["gpus"], actors["gpus"] = shares
    own = config.learner
    steps_here = of_rank > 0 and own.offload_optimizer and config.deploy.ray_address == "local"
    if steps_here and (own.threads, own.cores) == (None, None):
        available = len(os.sched_getaffinity(0)) if cores is None else cores
        learner["threads"] = max(1, available // 2 // own.ranks)
    return config.updated(**changes) if any(changes.values()) else config


def dtypes_here(config: RunConfig, *, on_gpu: bool) -> dict[str, dict[str, Any]]:
    """Return the dtypes of sections by the rule of learner.dtype, where a recipe leaves them to it.

    Raises InputError if `auto` has to read a model that is not here.
    """
    learner, actors, path = config.learner, config.actors, config.model.path
    is_given = "dtype" in learner.model_fields_set | actors.model_fields_set
    chosen = {
        name: _automatic(section, getattr(section, "path", None) or path, name, on_gpu=on_gpu)
        for name in ("sft", "prefer", "reward_model")
        if (section := getattr(config, name)) is not None and section.dtype == "auto"
    }
    if learner.dtype == "auto" and actors.dtype != "auto":
        chosen["learner"] = actors.dtype
    elif learner.dtype == "auto" or (not is_given and on_gpu and path and learner.zero_stage):
        chosen["learner"] = chosen["actors"] = _automatic(learner, path, "learner", on_gpu=on_gpu)
    return {name: {"dtype": dtype} for name, dtype in chosen.items()}


def _automatic(
    section: LearnerConfig | SupervisedConfig, path: str | None, name: str, *, on_gpu: bool
) -> str:
    if path is None or section.zero_stage == 0:
        return "float32"
    if on_gpu:
        return "bfloat16"
    folder = Path(path).expanduser()
    if 0 < sum(f.stat().st_size for f in folder.glob("*.safetensors") if f.exists()) < SMALL:
        return "float32"
    try:
        own = served_dtype(str(folder) if folder.is_dir() else path, "auto")
    except InputError as error:
        raise InputError(f'{name}.dtype = "auto": {error}; or name a dtype') from error
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

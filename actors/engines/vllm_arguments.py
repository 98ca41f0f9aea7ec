"""The arguments of a vLLM engine, and the variables of its processes' environment.

Imports vLLM only where it is called: vLLM reads its environment when it is imported.
"""

import os
from itertools import pairwise
from typing import Any

from actors.engines.model_folder import kv_bytes_per_token, served_dtype
from actors.engines.protocol import EngineSpec
from actors.engines.sampling_rules import check_sampling
from headway.cpu_cores import bind_process, parse_cores
from headway.errors import InputError
from weight_sync.vllm.transfer import BACKEND

CPU_BLOCK_TOKENS = 32
"""Tokens of a KV cache block, which is cached only when full: vLLM's 128 exceed a short turn."""
KV_SHARE, KV_LIMIT = 0.25, 0.5
"""Shares of the free memory for the KV caches of all engines on a CPU; at most, for one rollout."""


def process_variables(spec: EngineSpec) -> dict[str, str]:
    """Return what vLLM's processes have to find in their environment when they begin.

    On a CPU vLLM would start a further process for the model, ten seconds later, and bind that
    alone; an engine with cores of its own runs its model itself.
    """
    variables = {
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "VLLM_NO_USAGE_STATS": os.environ.get("VLLM_NO_USAGE_STATS", "1"),
    }
    if spec.weight_sync.transport == "ipc":  # handles arrive pickled, in this process's own alone
        variables["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    if spec.config.enforce_eager and not spec.config.gpus:
        # vLLM would compile a comparison of log-probabilities, two seconds for the first token.
        variables["TORCH_COMPILE_DISABLE"] = "1"
    if (cores := cores_of(spec)) is None:
        return variables
    workers = spec.config.tensor_parallel_size  # neighbours share memory; too few cores are shared
    ends = [len(cores) * number // workers for number in range(workers + 1)]
    shares = [cores[first:end] or cores for first, end in pairwise(ends)]
    variables["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, own)) for own in shares)
    if not in_one_process(spec):
        return variables
    return variables | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": str(len(cores)),
        "OMP_PLACES": "{" + ",".join(map(str, cores)) + "}",
        "OMP_PROC_BIND": "true",
    }


def cores_of(spec: EngineSpec) -> list[int] | None:
    """Return the cores of an engine; None where it has none of its own."""
    return parse_cores(spec.config.cores[spec.index]) if spec.config.cores else None


def in_one_process(spec: EngineSpec) -> bool:
    """Return True if the process of the engine runs the model too."""
    config = spec.config
    return not config.gpus and bool(config.cores) and config.tensor_parallel_size == 1


def engine_arguments(spec: EngineSpec, max_model_len: int) -> dict[str, Any]:
    """Return vLLM's arguments, and bind this process to the engine's cores; see `check_sampling`.

    The variables of the environment are those of `process_variables`.
    """
    check_sampling(spec.model_path)
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would win over the recipe
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.platforms import current_platform

    transfer = WeightTransferConfig(
        backend=BACKEND if spec.weight_sync.staged else spec.weight_sync.transport
    )
    arguments = {**plain_arguments(spec, max_model_len), "weight_transfer_config": transfer}
    cpu = current_platform.is_cpu()
    if spec.config.enforce_eager == "auto":
        arguments["enforce_eager"] = cpu
    if cpu:
        from vllm.utils.cpu_resource_utils import get_memory_node_info, get_visible_memory_node

        free = get_memory_node_info(get_visible_memory_node()[0]).available_memory
        arguments["kv_cache_memory_bytes"] = kv_cache_bytes(spec, max_model_len, free)
        arguments["block_size"] = CPU_BLOCK_TOKENS
        if (cores := cores_of(spec)) is not None and in_one_process(spec):
            bind_process(cores, "actors.cores")
            arguments["distributed_executor_backend"] = "uni"
    return arguments


def plain_arguments(spec: EngineSpec, max_model_len: int) -> dict[str, Any]:
    """Return the arguments that do not depend on the platform."""
    config = spec.config
    arguments: dict[str, Any] = {
        "model": spec.model_path,
        # vLLM's own "auto" makes bfloat16 of float32.
        "dtype": served_dtype(spec.model_path, config.dtype),
        "max_model_len": max_model_len,
        "max_num_seqs": config.max_concurrent_rollouts,
        "gpu_memory_utilization": config.gpu_memory_share,
        "tensor_parallel_size": config.tensor_parallel_size,
        "enforce_eager": config.enforce_eager,
        "seed": spec.seed * config.count + spec.index,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # no defaults for sampling from the model folder
        "disable_log_stats": not spec.engine_metrics,
    }
    if config.tensor_parallel_size > 1:  # in a placement group vLLM would ask Ray for its workers
        arguments["distributed_executor_backend"] = "mp"
    if spec.weight_sync.staged:
        arguments["worker_extension_cls"] = "weight_sync.vllm.plugin.PreparesWeights"
    if config.float32_head:
        arguments["hf_overrides"] = {"head_dtype": "float32"}
    arguments |= config.vllm_options
    if spec.initial_version is not None:  # it serves the weights of the folder
        arguments.pop("load_format", None)
    return arguments


def kv_cache_bytes(spec: EngineSpec, max_model_len: int, free: int) -> int:
    """Return the size of the KV cache of one of `actors.count` engines on this machine's CPU.

    Without `actors.kv_cache_gib` it holds all concurrent rollouts at their full length,
    `max_model_len` tokens, or as many as fit into an equal share of the `free` bytes of memory.
    Raises InputError if the share does not hold a single rollout.
    """
    config = spec.config
    if config.kv_cache_gib is not None:
        return int(config.kv_cache_gib * 2**30)
    blocks = -(-max_model_len // CPU_BLOCK_TOKENS)
    block = CPU_BLOCK_TOKENS * kv_bytes_per_token(spec.model_path, config.dtype)
    least = (blocks + 1) * block  # vLLM keeps one block for itself
    limit = int(KV_LIMIT * free / config.count)
    if least > limit:
        raise InputError(
            f"one rollout of actors.max_model_len = {max_model_len} tokens needs "
            f"{least / 2**30:.2f} GiB of KV cache, and each of {config.count} engine(s) may take "
            f"{limit / 2**30:.2f} of the {free / 2**30:.2f} GiB of memory that are free; lower "
            "actors.max_model_len (prompt and answer together), or set actors.kv_cache_gib"
        )
    share = int(KV_SHARE * free / config.count)
    return max(least, min(share, (config.max_concurrent_rollouts * blocks + 1) * block))

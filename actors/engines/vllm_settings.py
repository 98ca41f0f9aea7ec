"""Settings of a vLLM engine, and the arguments and environment that they become.

Imports vLLM only where it is called: vLLM reads its environment when it is imported.
"""

import math
import os
from dataclasses import dataclass
from typing import Any, Literal

from queues.runtime.cpu_affinity import bind_process, parse_cores
from weight_sync.vllm.transfer import BACKEND

CPU_BLOCK_TOKENS = 32
"""Tokens of a KV cache block, which is cached only when full: vLLM's 128 exceed a short turn."""


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """How one engine is made; fields without a comment are those of the recipe."""

    model_path: str
    """Local folder or hub name; its weights give the shapes and the first values."""
    max_model_len: int
    dtype: str = "auto"
    float32_head: bool = False
    max_num_seqs: int = 64
    """Requests that run at once; the others queue."""
    cores: str | None = None
    kv_cache_gib: float | None = None
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    enforce_eager: bool = True
    seed: int = 0
    """Seed of requests without a seed of their own."""
    update_mode: Literal["in_flight", "between_requests"] = "in_flight"
    clear_cache: bool = False
    weight_backend: str = BACKEND
    """Weight transfer of vLLM: BACKEND loads staged weights, for the others see `transfer`."""
    initial_version: int | None = None
    """Version of the weights in `model_path`; None leaves the engine STALE."""
    engine_metrics: bool = False

    def engine_arguments(self) -> dict[str, Any]:
        """Prepare this process and its environment, and return the arguments of vLLM's engine.

        Raises:
            InputError: This machine does not have the cores.
        """
        self._set_environment()
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.platforms import current_platform

        transfer = WeightTransferConfig(backend=self.weight_backend)
        arguments = {**self.plain_arguments(), "weight_transfer_config": transfer}
        if current_platform.is_cpu():
            arguments["block_size"] = CPU_BLOCK_TOKENS
            if self.cores is not None and self.tensor_parallel_size == 1:
                run_in_one_process(parse_cores(self.cores))
                arguments["distributed_executor_backend"] = "uni"
        return arguments

    def plain_arguments(self) -> dict[str, Any]:
        """Return the arguments that do not depend on the platform."""
        arguments: dict[str, Any] = {
            "model": self.model_path,
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "tensor_parallel_size": self.tensor_parallel_size,
            "enforce_eager": self.enforce_eager,
            "seed": self.seed,
            "logprobs_mode": "processed_logprobs",
            "disable_log_stats": not self.engine_metrics,
        }
        if self.tensor_parallel_size > 1:  # in a placement group vLLM would ask Ray for its workers
            arguments["distributed_executor_backend"] = "mp"
        if self.weight_backend == BACKEND:
            arguments["worker_extension_cls"] = "weight_sync.vllm.plugin.PreparesWeights"
        if self.float32_head:
            arguments["hf_overrides"] = {"head_dtype": "float32"}
        return arguments

    def _set_environment(self) -> None:
        """Set what vLLM reads when it is imported and when it starts its processes."""
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        if self.cores is not None:
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = self.cores
        if self.kv_cache_gib is not None:
            os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(math.ceil(self.kv_cache_gib))


def run_in_one_process(cores: list[int]) -> None:
    """Bind this process and the engine's to cores, and let vLLM run its model in the latter.

    On a CPU vLLM would start a third process for the model, ten seconds later, and bind that alone.
    OpenMP reads these variables when a process begins.

    Raises:
        InputError: This machine does not have the cores.
    """
    bind_process(cores, "actors.cores")
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        OMP_NUM_THREADS=str(len(cores)),
        OMP_PLACES="{" + ",".join(map(str, cores)) + "}",
        OMP_PROC_BIND="true",
    )

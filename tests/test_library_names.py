"""Every name of vLLM, Ray and DeepSpeed that the product uses exists in the locked packages.

Imports and attributes of imported modules are read from the source. Methods and options of objects
of these libraries are listed here, and each must still occur in the source.
"""

import ast
import functools
import importlib
import inspect
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("actors", "deploy", "learner", "queues", "weight_sync")
LIBRARIES = [
    pytest.param("vllm", marks=pytest.mark.vllm),
    pytest.param("ray", marks=pytest.mark.ray),
    pytest.param("deepspeed", marks=pytest.mark.deepspeed),
]
MEMBERS = {
    "vllm.v1.engine.async_llm:AsyncLLM": (
        "from_engine_args generate abort errored engine_core collective_rpc resume_generation "
        "update_weight_version init_weight_transfer_engine shutdown_weight_transfer_engine "
        "start_weight_update update_weights finish_weight_update shutdown"
    ),
    "vllm.v1.engine.core_client:AsyncMPClient": "pause_scheduler_async",
    "vllm.v1.worker.gpu_worker:Worker": "start_weight_update finish_weight_update",
    "vllm.distributed.weight_transfer.base:WeightTransferEngine": (
        "init_transfer_engine start_weight_update receive_weights finish_weight_update shutdown "
        "parse_update_info update_weights"
    ),
    "vllm.model_executor.model_loader.default_loader:DefaultModelLoader": "get_all_weights",
    "vllm.distributed.weight_transfer.base:TrainerWeightTransferEngine": "send_weights shutdown",
    "vllm.model_executor.model_loader.reload.types:LayerReloadingInfo": (
        "can_load reset load_numel load_numel_total kernel_tensors restore_metadata"
    ),
    "vllm.outputs:CompletionOutput": "token_ids logprobs weight_versions finish_reason",
    "ray.util.placement_group:PlacementGroup": "wait",
    "deepspeed.runtime.zero.partition_parameters:Init": "_convert_to_zero_parameters",
    "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3": (
        "empty_partition_cache grad_position get_param_id"
    ),
    "deepspeed.runtime.engine:DeepSpeedEngine": (
        "backward step get_global_grad_norm gradient_clipping destroy"
    ),
}
"""Attributes of objects that are not imported by their own name, by class."""
OPTIONS = {
    "vllm.sampling_params:SamplingParams": (
        "temperature top_p top_k seed max_tokens logprobs flat_logprobs stop stop_token_ids "
        "detokenize output_kind stream_interval"
    ),
    "vllm.config:LoadConfig": "use_tqdm_on_load",
    "vllm.v1.worker.gpu.sample.sampler:Sampler": "logprobs_mode",
    "vllm.distributed.weight_transfer.nccl_engine:NCCLTrainerInitInfo": (
        "rank master_address master_port world_size packed_buffer_size_bytes"
    ),
    "vllm.distributed.weight_transfer.ipc_engine:IPCTrainerInitInfo": (
        "rank packed packed_buffer_size_bytes"
    ),
    "vllm.distributed.weight_transfer.ipc_engine:IPCWeightTransferUpdateInfo": (
        "ipc_handles ipc_handles_pickled"
    ),
    "vllm.distributed.weight_transfer.nccl_common:NCCLWeightTransferInitInfo": "rank_offset",
    "vllm.engine.arg_utils:AsyncEngineArgs": (
        "model dtype max_model_len max_num_seqs gpu_memory_utilization tensor_parallel_size "
        "enforce_eager seed logprobs_mode generation_config disable_log_stats hf_overrides "
        "distributed_executor_backend worker_extension_cls weight_transfer_config "
        "kv_cache_memory_bytes block_size"
    ),
}
"""Arguments of constructors."""


def sources() -> Iterator[ast.Module]:
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            yield ast.parse(file.read_text())


def imported(tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    """Yield the name that each import binds, its module, and its name in the module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                module = name.name if name.asname else name.name.split(".")[0]
                yield name.asname or module, module, ""
                yield name.name, name.name, ""
        elif isinstance(node, ast.ImportFrom) and node.module:
            for name in node.names:
                yield name.asname or name.name, node.module, name.name


def used_names(library: str) -> set[str]:
    """Return the full names in a library that the product imports or reads."""
    used: set[str] = set()
    for tree in sources():
        names = {
            alias: f"{module}.{name}".rstrip(".")
            for alias, module, name in imported(tree)
            if module.split(".")[0] == library
        }
        used |= set(names.values())
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                first, *others = ast.unparse(node).split(".")
                if first in names and all(part.isidentifier() for part in others):
                    used.add(".".join([names[first], *others]))
    return used


def resolve(dotted: str) -> object:
    """Return an object by its full name, importing what is a module."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        with suppress(ModuleNotFoundError):
            module = importlib.import_module(".".join(parts[:end]))
            return functools.reduce(getattr, parts[end:], module)
    raise ImportError(f"there is no {parts[0]}")


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_name_that_is_imported_or_read_exists(library: str) -> None:
    missing = []
    names = sorted(used_names(library))
    assert len(names) > (2 if library == "deepspeed" else 20)
    for name in names:
        try:
            resolve(name)
        except (ImportError, AttributeError) as error:
            missing.append(f"{name}: {error}")
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_member_and_option_that_is_used_exists(library: str) -> None:
    text = "\n".join(ast.unparse(tree) for tree in sources())
    missing = []
    for table, is_there in ((MEMBERS, has_member), (OPTIONS, has_option)):
        for place, names in table.items():
            module, kind = place.split(":")
            if module.split(".")[0] != library:
                continue
            owner = getattr(importlib.import_module(module), kind)
            for name in names.split():
                assert name in text, f"{name} of {place} is not used any more"
                if not is_there(owner, name):
                    missing.append(f"{place}.{name}")
    assert not missing, "\n".join(missing)


def has_member(owner: type, name: str) -> bool:
    """Return True if objects of a class have an attribute, by its source or its fields."""
    return (
        hasattr(owner, name)
        or name in getattr(owner, "__annotations__", {})
        or f"self.{name} " in inspect.getsource(owner)
        or f"self.{name}:" in inspect.getsource(owner)
    )


def has_option(owner: type, name: str) -> bool:
    """Return True if a constructor takes an argument."""
    return name in inspect.signature(owner).parameters

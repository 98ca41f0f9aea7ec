"""Predicts the memory of a recipe for `headway validate` and `headway plan`, and shows it."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import psutil
from rich.console import Console

from actors.engines.model_folder import (
    attention_heads,
    context_length,
    kv_bytes_per_token,
    parallel_sizes,
    served_dtype,
    vocabulary_size,
)
from actors.engines.protocol import EngineSpec
from actors.engines.vllm_arguments import kv_cache_bytes
from deploy.config.devices import visible_gpus
from deploy.config.run_config import RunConfig
from deploy.memory.measure import Microbatch, measure
from deploy.memory.predict import Capacity, Prediction, Sizes, described, gib, predict, refuse
from deploy.memory.processes import GIB, EngineSizes, total
from deploy.preflight.models import check_workers, find_model, model_path
from headway.errors import HeadwayError, InputError
from learner.model.logprobs import LogprobOptions


@dataclass(frozen=True, slots=True)
class Predicted:
    """The memory of a recipe, and what there is."""

    prediction: Prediction
    capacity: Capacity

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values, in bytes."""
        return asdict(self)


def check_memory(config: RunConfig, console: Console) -> Predicted | None:
    """Predict the memory of a recipe and print it; None where its models cannot be measured here.

    Raises:
        InputError: The run cannot fit; names what does not, and settings with which it does.
    """
    capacity = capacity_of(config)
    try:
        path = find_model(config.model.path) if config.model.path else model_path(config)
        longest = longest_sequence(config, path)
        sizes = _measure(config, path, longest)
    except HeadwayError as error:
        console.print(f"memory is not predicted: {error}", markup=False, soft_wrap=True)
        return None
    check_workers(config, path)
    prediction = predict(config, sizes, capacity)
    refuse(config, prediction, lambda changed: _measure(changed, path, longest), capacity, longest)
    predicted = Predicted(prediction, capacity)
    show(predicted, console)
    return predicted


def capacity_of(config: RunConfig) -> Capacity:
    """Return what `[deploy.node]` gives, but no more than this machine has if the run is on it."""
    node, actors, learner = config.deploy.node, config.actors, config.learner
    gpus, gpu = node.gpus, node.gpu_gib and node.gpu_gib * GIB
    host = node.memory_gib and node.memory_gib * GIB
    needed = actors.count * actors.gpus + learner.ranks * learner.gpus
    here = visible_gpus()
    if config.deploy.ray_address != "local" or needed > here:
        return Capacity(gpus=gpus, gpu=gpu, host=host)
    if needed:
        own = memory_of_gpu()
        gpu = own if gpu is None else min(gpu, own)
    memory = psutil.virtual_memory().total
    return Capacity(
        gpus=here if gpus is None else min(gpus, here),
        gpu=gpu,
        host=memory if host is None else min(host, memory),
    )


def memory_of_gpu() -> float:
    """Return the bytes of memory of the first GPU of this machine.

    Raises:
        InputError: torch cannot use it, as with a driver that is too old.
    """
    import torch

    try:
        return float(torch.cuda.get_device_properties(0).total_memory)
    except (RuntimeError, AssertionError) as error:  # the latter without CUDA in torch's build
        raise InputError(
            f"this machine has {visible_gpus()} GPU(s) that torch {torch.__version__} cannot use: "
            f"{str(error).strip().splitlines()[0]}; CUDA 13 and a driver of NVIDIA of version 580 "
            "or newer are needed (nvidia-smi shows it)"
        ) from error


def longest_sequence(config: RunConfig, path: str) -> int:
    """Return the tokens of the longest rollout, prompt included, as far as the recipe says."""
    actors = config.actors
    said = actors.max_model_len or actors.max_new_tokens + (config.prompts.max_tokens or 0)
    return min(said, context_length(path))


def _measure(config: RunConfig, path: str, longest: int) -> Sizes:
    learner, prompts, actors = config.learner, config.prompts, config.actors
    rollouts = prompts.groups_per_batch * prompts.group_size
    of_a_rank = -(-rollouts * longest // (learner.minibatches * learner.ranks))
    batch = Microbatch(
        tokens=max(longest, min(learner.microbatch_tokens, of_a_rank)),
        longest=longest,
        dtype=learner.dtype,
        attention=learner.attention,
        activation_checkpointing=learner.activation_checkpointing,
        head=LogprobOptions(
            chunk=learner.logprob_chunk,
            float32_head=learner.float32_head,
            entropy_gradient=learner.entropy is not None,
        ),
        lora=learner.lora,
    )
    policy, critic = measure(path, batch), None
    if learner.critic is not None and not learner.critic.shared:
        batch = replace(batch, head=None, lora=learner.critic.lora)
        critic = measure(learner.critic.path or path, batch)
    context = actors.max_model_len or context_length(path)
    spec = EngineSpec(
        index=0, config=actors, weight_sync=config.weight_sync, model_path=path, seed=0
    )
    free = psutil.virtual_memory().available
    dtype = served_dtype(path, actors.dtype)
    kv_share = 2 if "fp8" in str(actors.vllm_options.get("kv_cache_dtype")) else 1
    return Sizes(
        policy=policy,
        critic=critic,
        served=EngineSizes(
            itemsize=4 if dtype == "float32" else 2,
            kv_token=kv_bytes_per_token(path, actors.dtype) // kv_share,
            kv_heads=attention_heads(path)[1],
            workers=parallel_sizes(path),
            vocabulary=vocabulary_size(path) or 0,
            context=context,
            cpu_cache=0 if actors.gpus else kv_cache_bytes(spec, context, free),
        ),
    )


def show(predicted: Predicted, console: Console) -> None:
    """Print the memory of each process and node in GiB."""
    prediction, capacity = predicted.prediction, predicted.capacity
    lines = ["memory at its peak, predicted, in GiB:"]
    for process in prediction.processes:
        lines.append(
            f"  {process.role} × {process.count}: host {gib(total(process.resident))} "
            f"({described(process.resident)})"
        )
        if process.device:
            lines.append(
                f"    each GPU {gib(total(process.device))}{_of(capacity.gpu)} "
                f"({described(process.device)}){process.note and '; ' + process.note}"
            )
    lines += [
        f"  {node.name}: {gib(total(node.parts))}{_of(capacity.host)} ({described(node.parts)})"
        for node in prediction.nodes
    ]
    lines.append(
        f"  disk: checkpoints {gib(prediction.checkpoints)}, journal up to "
        f"{gib(prediction.journal)}"
    )
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def _of(capacity: float | None) -> str:
    return "" if capacity is None else f" of {gib(capacity)}"

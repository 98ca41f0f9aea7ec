"""Sizes of a recipe's models, measured on torch's meta device, which has shapes and no data.

A model is built from its configuration alone, and a microbatch of the recipe is computed forward
and backward through it. What every operation allocates and what autograd keeps is counted.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.backends.cpu import get_cpu_capability
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from actors.engines.model_folder import (
    attention_heads,
    configuration,
    context_length,
    kv_bytes_per_token,
    parallel_sizes,
    served_dtype,
    vocabulary_size,
)
from actors.engines.protocol import EngineSpec
from actors.engines.vllm_arguments import kv_cache_bytes
from deploy.config.run_config import RunConfig
from deploy.planner.byte_counts import WEIGHT
from headway.errors import InputError, first_line
from learner.config.lora import LoraConfig
from learner.model import lora
from learner.model.logprobs import LogprobOptions, chunked_logprobs
from learner.model.policy import checkpoint_activations

NAME = "headway_measured"
"""Name of the attention that is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Sizes of a model and of one microbatch through it."""

    parameters: int
    """Weights, tied ones once, and the factors of an adapter."""
    trained: int
    """Weights that have gradients."""
    largest_layer: int
    """Weights of the largest transformer block."""
    largest_tensor: int
    """Weights of the largest tensor."""
    largest_adapted: int = 0
    """Weights of the largest tensor that an adapter changes."""
    activations: int
    """Bytes that autograd keeps from the forward to the backward pass."""
    passing: int
    """Bytes beyond them at the peak of a pass: logits, gradients of the head, temporary tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSizes:
    """Sizes that the memory of an engine depends on, beside its weights."""

    itemsize: int
    """Bytes of a weight that it serves."""
    kv_token: int
    """Bytes of KV cache of one token, of all heads."""
    kv_heads: int
    """Heads with keys and values of their own, of which a worker holds one at least."""
    workers: tuple[int, ...]
    """Values of `actors.tensor_parallel_size` by which its weights can be divided."""
    vocabulary: int
    context: int
    """Longest rollout in tokens."""
    cpu_cache: int
    """Bytes of the KV cache of an engine on a CPU."""
    packed: bool
    """Whether kernels of a CPU keep packed copies of its weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of all models of a recipe under its settings."""

    policy: ModelSizes
    critic: ModelSizes | None
    teachers: tuple[ModelSizes, ...] = ()
    served: EngineSizes
    longest: int
    """Tokens of the longest rollout, prompt included, as far as the recipe says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """A microbatch, and the settings that it is computed with."""

    tokens: int
    longest: int
    """Tokens of its longest sequence."""
    dtype: str
    attention: str
    activation_checkpointing: bool
    head: LogprobOptions | None
    """None for a critic, which has no head of a language model."""
    lora: LoraConfig | None = None
    """The adapter that is trained; None: all weights are."""


def measure(config: RunConfig, path: str) -> Sizes:
    """Measure the models of a recipe, whose policy is in `path`, and their longest microbatch.

    Raises HeadwayError if a model is not here, or cannot be measured without its data.
    """
    learner, prompts, actors = config.learner, config.prompts, config.actors
    most = actors.max_model_len or actors.max_new_tokens + (prompts.max_tokens or 0)
    longest = min(most, context_length(path))
    rollouts = prompts.groups_per_batch * prompts.group_size
    rank_tokens = -(-rollouts * longest // (learner.minibatches * learner.ranks))
    batch = Microbatch(
        tokens=max(longest, min(learner.microbatch_tokens, rank_tokens)),
        longest=longest,
        dtype=learner.dtype,
        attention=learner.attention,
        activation_checkpointing=learner.activation_checkpointing,
        head=LogprobOptions(
            chunk=learner.logprob_chunk,
            float32_head=learner.float32_head,
            entropy_gradient=learner.entropy is not None,
            compiled=learner.compiles,
        ),
        lora=learner.lora,
    )
    policy, critic = measure_model(path, batch), None
    if learner.critic is not None and not learner.critic.shared:
        batch = replace(batch, head=None, lora=learner.critic.lora)
        critic = measure_model(learner.critic.path or path, batch)
    frozen = replace(batch, head=None, lora=None, activation_checkpointing=False)
    teachers = tuple(
        measure_model(teacher.path, frozen)
        for teacher in (learner.distillation.teachers if learner.distillation else ())
    )
    context = actors.max_model_len or context_length(path)
    spec = EngineSpec(
        index=0, config=actors, weight_sync=config.weight_sync, model_path=path, seed=0
    )
    free = psutil.virtual_memory().available
    itemsize = WEIGHT.get(served_dtype(path, actors.dtype), 2)
    kv_share = 2 if "fp8" in str(actors.vllm_options.get("kv_cache_dtype")) else 1
    return Sizes(
        policy=policy,
        critic=critic,
        teachers=teachers,
        longest=longest,
        served=EngineSizes(
            itemsize=itemsize,
            kv_token=kv_bytes_per_token(path, actors.dtype) // kv_share,
            kv_heads=attention_heads(path)[1],
            workers=parallel_sizes(path),
            vocabulary=vocabulary_size(path) or 0,
            context=context,
            cpu_cache=0 if actors.gpus else kv_cache_bytes(spec, context, free),
            packed=itemsize == WEIGHT["float32"] or get_cpu_capability() != "AVX2",
        ),
    )


@cache
def measure_model(model_path: str, batch: Microbatch) -> ModelSizes:
    """Measure a model, of which only the configuration is read, and a microbatch through it.

    Raises InputError if the model cannot be built or computed without data.
    """
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

    config = configuration(model_path)
    whole, rest = divmod(batch.tokens, batch.longest)
    lengths = [batch.longest] * whole + [rest] * (rest > 0)
    AttentionInterface.register(NAME, partial(_attend, lengths=lengths))
    AttentionMaskInterface.register(NAME, partial(_mask, tokens=batch.tokens))
    try:
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(
                config,
                dtype=getattr(torch, batch.dtype),
                attn_implementation="eager" if batch.attention == "eager" else NAME,
            )
            if batch.lora is not None:
                lora.add_adapter(model, batch.lora.model_copy(update={"path": None}), seed=0)
        if batch.activation_checkpointing:
            checkpoint_activations(model, model_path)
        activations, peak = _pass(model, batch)
    except Exception as error:  # a model raises anything where it needs data
        raise InputError(
            f"model {model_path!r} cannot be measured without its data: {first_line(error)}"
        ) from error
    blocks = [
        sum(parameter.numel() for parameter in block.parameters())
        for blocks in model.modules() if isinstance(blocks, torch.nn.ModuleList)
        for block in blocks
    ]  # fmt: skip
    return ModelSizes(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        trained=sum(tensor.numel() for tensor in model.parameters() if tensor.requires_grad),
        largest_tensor=max(parameter.numel() for parameter in model.parameters()),
        largest_layer=max(blocks, default=0),
        largest_adapted=max(
            (weight.parameters[0].numel() for weight in lora.weights(model) if weight.scale),
            default=0,
        ),
        activations=activations,
        passing=peak - activations,
    )


def _pass(model: Any, batch: Microbatch) -> tuple[int, int]:
    """Compute a microbatch forward and backward; return bytes kept between, and the peak."""
    token_ids = torch.zeros(1, batch.tokens, dtype=torch.long, device="meta")
    position_ids = torch.zeros_like(token_ids)
    everything = torch.ones_like(token_ids)  # else transformers would look for sequences in a row
    for parameter in model.parameters():  # DeepSpeed takes each gradient as soon as it is there
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
    with Allocations(model) as allocations:
        hidden = model.base_model(
            input_ids=token_ids,
            position_ids=position_ids,
            attention_mask=everything,
            use_cache=False,
        ).last_hidden_state[0]
        activations = allocations.live
        output = hidden
        if batch.head is not None:
            weight = model.get_output_embeddings().weight
            output, _ = chunked_logprobs(hidden[:-1], weight, token_ids[0, 1:], batch.head)
        output.sum().backward()
    return activations, allocations.peak


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _attend(
    _module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    lengths: list[int],
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend as `packed_attention` does, or with a mask over the row, and keep as much.

    On the meta device torch itself would choose an attention that keeps all scores. The one here
    returns the width of queries, where that of values may be another.
    """
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    if attention_mask is not None:
        bias = attention_mask.to(query.dtype)
        output = fused(query, key, value, is_causal=False, attn_mask=bias)[0]
        return output[..., : value.shape[-1]].transpose(1, 2).contiguous(), None
    columns = (torch.split(column, lengths, dim=2) for column in (query, key, value))
    outputs = [fused(*part, is_causal=True)[0] for part in zip(*columns, strict=True)]
    joined = torch.cat([output.transpose(1, 2) for output in outputs], dim=1)
    return joined[..., : value.shape[-1]], None


def _mask(*, tokens: int, local_size: int | None = None, **_: Any) -> Tensor | None:
    """Return the mask [1, 1, N, N] of a layer with a window, and none for other layers."""
    if not local_size:
        return None
    return torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device="meta")


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all storages that live, but for those of a model's own tensors.

    It gives what torch's own `MemTracker` gives, in a fiftieth of the time.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        own = [*model.parameters(), *model.buffers()]
        self._known = {tensor.untyped_storage()._cdata for tensor in own}
        self.live = self.peak = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **kwargs or {})
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return output

    def _count(self, storage: torch.UntypedStorage) -> None:
        if (key := storage._cdata) in self._known:
            return
        self._known.add(key)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._freed, key, storage.nbytes()).atexit = False

    def _freed(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.live -= nbytes

"""Sizes of a model, measured on torch's meta device, which has shapes and no data.

The model is built from its configuration alone, and a microbatch of the recipe is computed forward
and backward through it. What every operation allocates and what autograd keeps is counted.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from actors.engines.model_folder import configuration
from deploy.memory.processes import ModelSizes
from headway.errors import InputError
from learner.config.lora import LoraConfig
from learner.model import lora
from learner.model.logprobs import LogprobOptions, chunked_logprobs
from learner.model.policy import checkpoint_activations

NAME = "headway_measured"
"""Name of the attention that is measured."""


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


@cache
def measure(model_path: str, batch: Microbatch) -> ModelSizes:
    """Measure a model, of which only the configuration is read, and a microbatch through it.

    Raises:
        InputError: The model cannot be built or computed without data.
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
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise InputError(
            f"model {model_path!r} cannot be measured without its data: {reason}"
        ) from error
    blocks = [
        sum(parameter.numel() for parameter in block.parameters())
        for blocks in model.modules() if isinstance(blocks, torch.nn.ModuleList)
        for block in blocks
    ]  # fmt: skip
    return ModelSizes(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        trained=sum(one.numel() for one in model.parameters() if one.requires_grad),
        largest_tensor=max(parameter.numel() for parameter in model.parameters()),
        largest_layer=max(blocks, default=0),
        largest_adapted=max(
            (one.parameters[0].numel() for one in lora.weights(model) if one.scale), default=0
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
        self._change(storage.nbytes())
        weakref.finalize(storage, self._freed, key, storage.nbytes()).atexit = False

    def _freed(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self._change(-nbytes)

    def _change(self, nbytes: int) -> None:
        self.live += nbytes
        self.peak = max(self.peak, self.live)

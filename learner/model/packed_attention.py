"""Attention over packed sequences, one sequence at a time, for transformers' models.

With torch's attention transformers would make a mask of N × N for N packed tokens and compute all
of it, though a token sees only its own sequence. Here torch is given each sequence alone, as causal
attention without a mask, unless it is longer than the layer's window. On a GPU in half precision
one call of `torch.nn.attention.varlen` has all sequences. `flash_attention_2` does that itself and
stays as it is.
"""

import inspect
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

log = logging.getLogger(__name__)

NAME = "headway_packed"

BY_SEQUENCE = {"sdpa": NAME, "eager": f"{NAME}_eager"}
"""Attention by sequences, by the attention of transformers that each of them is given to."""

KNOWN = {
    "dropout", "scaling", "is_causal", "position_ids", "sliding_window", "use_cache",
    "output_attentions", "output_hidden_states", "output_router_logits", "past_key_values",
    "cache_position",
}  # fmt: skip
"""Options of attention that torch's kernels heed, or that change nothing without a cache."""

LARGEST_HEAD = 256
"""Size of a head up to which `varlen_attn` computes it."""

TRIED = [[5, 3, 7], [4, 4, 7, 3, 5]]
"""Sequences whose results are compared, packed and each alone."""

TOLERANCE, HALF_TOLERANCE = 0.01, 0.1
"""Largest difference, relative to the norm, that counts as rounding, in float32 and in half
precision. A token that sees another sequence differs by about the norm."""


def attend_packed(model: Any) -> bool:
    """Make a model attend one sequence at a time, if that gives the same results.

    It is changed if it computes plain causal attention by torch's `scaled_dot_product_attention`,
    or step by step by a function of its own (`eager`). Return True then; the log gives the reason
    why a model that was tried stays as it is.
    """
    plain = model.config._attn_implementation
    if plain not in BY_SEQUENCE:
        return plain in BY_SEQUENCE.values()
    from transformers import AttentionInterface, AttentionMaskInterface

    for name, attend in zip(BY_SEQUENCE.values(), (_attend, _attend_step_by_step), strict=True):
        AttentionInterface.register(name, torch.compiler.disable(attend))  # type: ignore[no-untyped-call]
        AttentionMaskInterface.register(name, _mask)
    most = HALF_TOLERANCE if model.dtype.itemsize < 4 else TOLERANCE
    try:
        expected = torch.cat([_try_out(model, [ids]) for ids in TRIED])
        model.set_attn_implementation(BY_SEQUENCE[plain])
        difference = float((_try_out(model, TRIED) - expected).norm() / expected.norm())
        why = "" if difference <= most else f"the results differ by {difference:.0%}"
    except Exception as error:  # noqa: BLE001  # models raise anything
        why = str(error) or repr(error)
    if why:
        model.set_attn_implementation(plain)
        log.info("%s keeps its mask over all packed tokens: %s", type(model).__name__, why)
    return not why


def plain_name(attention: str) -> str:
    """Return the attention of transformers that each sequence is given to."""
    return {name: plain for plain, name in BY_SEQUENCE.items()}.get(attention, attention)


@contextmanager
def plain_attention(
    model: Any, attention: str | None = None, *, written_out: bool
) -> Iterator[None]:
    """Have a model attend as in transformers for a while: step by step, or by an `attention`.

    None is its own. Kernels leave out what they cannot do, such as a cap on scores, without a word.
    """
    chosen = model.config._attn_implementation
    plain = "eager" if written_out else attention or plain_name(chosen)
    if plain != chosen:
        model.set_attn_implementation(plain)
    try:
        yield
    finally:
        if plain != chosen:
            model.set_attn_implementation(chosen)


class _NotOneRow(ValueError):
    """Attention is not that of packed sequences, each causal."""


def _mask(
    *, config: Any, local_size: int | None = None, use_vmap: bool = False, **options: Any
) -> int | None:
    """Return the window of a layer in tokens, which `_attend` gets in place of a mask, or None."""
    if use_vmap or "allow_is_bidirectional_skip" in options:
        raise _NotOneRow("it has layers that are not causal")
    if local_size and local_size == getattr(config, "attention_chunk_size", None):
        raise _NotOneRow(f"it has layers that attend in chunks of {local_size} tokens")
    return local_size


@torch.no_grad()
def _try_out(model: Any, sequences: list[list[int]]) -> Tensor:
    """Return the last hidden states [N, H], or the logits, of packed sequences."""
    token_ids = torch.cat([torch.tensor(ids) for ids in sequences])[None].to(model.device)
    position_ids = torch.cat([torch.arange(len(ids)) for ids in sequences])[None].to(model.device)
    outputs = model.base_model(input_ids=token_ids, position_ids=position_ids, use_cache=False)
    states: Tensor = outputs[0][0]
    return states.float()


def ends_of(position_ids: Tensor) -> Tensor:
    """Return 0 and the end of each sequence of a row, [S + 1] int32 in host memory.

    Its positions [N] are 0 where a sequence begins.
    """
    starts = (position_ids == 0).nonzero().flatten().cpu()
    return torch.nn.functional.pad(starts, (0, 1), value=len(position_ids)).int()


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: int | None,
    sequence_ends: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return attention [1, N, heads, size] of sequences with these ends, from `hidden_states`.

    Layers that pass on positions alone have them counted anew. `attention_mask` is what
    `_mask` returned: the window of the layer.
    """
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    unknown = [name for name, option in options.items() if option is not None and name not in KNOWN]
    if unknown:
        raise _NotOneRow(f"its attention is given {', '.join(unknown)}, which kernels leave out")
    ends = _ends(query, attention_mask, sequence_ends, options)
    options.setdefault("is_causal", getattr(module, "is_causal", True))
    if options["is_causal"] and _has_kernel(query):
        scale = options.get("scaling")
        return _attend_at_once(query, key, value, ends, scale, attention_mask), None
    if not _shares_keys(query):
        key, value = (repeat_kv(kv, query.shape[1] // kv.shape[1]) for kv in (key, value))
        module = torch.nn.Module()  # without an attribute for groups of heads
    outputs = []
    for part in _split(ends, query, key, value):
        band, more = None, {}
        if attention_mask is not None and part[0].shape[2] > attention_mask:
            band, more = _band(part[0].shape[2], attention_mask, query.device), {"is_causal": False}
        outputs.append(sdpa_attention_forward(module, *part, band, **{**options, **more})[0])
    return torch.cat(outputs, dim=1), None


def _attend_step_by_step(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: int | None,
    sequence_ends: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return attention as `_attend` does, by the model's own function, which heeds all options."""
    attend = sys.modules[type(module).__module__].eager_attention_forward
    ends = _ends(query, attention_mask, sequence_ends, options)
    outputs = []
    for part in _split(ends, query, key, value):
        length = part[0].shape[2]
        hidden = ~_band(length, attention_mask or length, query.device)
        band = torch.zeros_like(hidden, dtype=query.dtype)
        band.masked_fill_(hidden, torch.finfo(query.dtype).min)
        outputs.append(attend(module, *part, band, **options)[0])
    return torch.cat(outputs, dim=1), None


def _ends(
    query: Tensor, mask: int | None, sequence_ends: Tensor | None, options: dict[str, Any]
) -> Tensor:
    """Return the ends of the sequences of a row, which layers may pass on as positions alone."""
    positions = options.get("position_ids")
    if positions is None or len(query) != 1 or isinstance(mask, Tensor):
        raise _NotOneRow("its attention is called without position_ids, or with a mask")
    return ends_of(positions.flatten()) if sequence_ends is None else sequence_ends


def _split(ends: Tensor, *columns: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield queries, keys and values [1, heads, n, size] of each sequence."""
    lengths: list[int] = ends.diff().tolist()
    yield from zip(*(torch.split(column, lengths, dim=2) for column in columns), strict=True)


def _attend_at_once(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Return causal attention [1, N, heads, size] of packed sequences, from [1, heads, N, size].

    `window` counts the tokens that a token sees, itself included; keys and values may have fewer
    heads. Only for GPUs and half precision.
    """
    offsets, longest = ends.to(query.device, non_blocking=True), int(ends.diff().max())
    attended = varlen_attn(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        offsets,
        offsets,
        longest,
        longest,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        **_grouping(query, key),
    )
    assert isinstance(attended, Tensor), "no auxiliary outputs were asked for"
    return attended[None]


def _grouping(query: Tensor, key: Tensor) -> dict[str, Any]:
    """Return how `varlen_attn` is told that keys have fewer heads; torch 2.11 sees it by itself."""
    known = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return {"enable_gqa": query.shape[1] != key.shape[1]} if known else {}


def _band(length: int, window: int, device: torch.device) -> Tensor:
    """Return the mask [1, 1, length, length] of a causal window: True where a token is seen."""
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return causal.triu(1 - window)[None, None]


def _has_kernel(query: Tensor) -> bool:
    """Return True if torch attends to sequences of several lengths at once for such tensors."""
    return query.is_cuda and query.dtype.itemsize == 2 and query.shape[-1] <= LARGEST_HEAD


def _shares_keys(query: Tensor) -> bool:
    """Return True if torch lets query heads share a key head without a matrix of scores.

    On GPUs it has kernels for that in half precision only.
    """
    return query.device.type == "cpu" or query.dtype != torch.float32

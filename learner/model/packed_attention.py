"""Attention over packed sequences, one sequence at a time, for transformers' models.

With torch's attention transformers would make a mask of N × N for N packed tokens and compute all
of it, though a token sees only its own sequence. Here torch is given each sequence alone, as causal
attention without a mask, unless it is longer than the layer's window. On a GPU in half precision
one call of `torch.nn.attention.varlen` has all sequences. `flash_attention_2` does that itself and
stays as it is.
"""

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from headway.errors import InputError

log = logging.getLogger(__name__)

NAME = "headway_packed"

LARGEST_HEAD = 256
"""Size of a head up to which `varlen_attn` computes it."""

TOLERANCE, HALF_TOLERANCE = 0.01, 0.1
"""Largest difference, relative to the norm, that counts as rounding, in float32 and in half
precision. A token that sees another sequence differs by about the norm."""


def attend_packed(model: Any) -> bool:
    """Make a model attend one sequence at a time, if that gives the same results.

    It is changed if it computes plain causal attention by torch's `scaled_dot_product_attention`.
    Return True then; the log gives the reason why a model that was tried stays as it is.
    """
    if model.config._attn_implementation != "sdpa":
        return False
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, torch.compiler.disable(_attend))  # type: ignore[no-untyped-call]
    AttentionMaskInterface.register(NAME, _mask)
    most = HALF_TOLERANCE if model.dtype.itemsize < 4 else TOLERANCE
    try:
        expected = _try_out(model)
        model.set_attn_implementation(NAME)
        difference = float((_try_out(model) - expected).norm() / expected.norm())
        why = "" if difference <= most else f"the results differ by {difference:.0%}"
    except (LookupError, TypeError, AttributeError, RuntimeError, ValueError, InputError) as error:
        why = str(error) or repr(error)
    if why:
        model.set_attn_implementation("sdpa")
        log.warning("%s keeps its mask over all packed tokens: %s", type(model).__name__, why)
    return not why


@contextmanager
def plain_attention(model: Any, *, written_out: bool) -> Iterator[None]:
    """Have a model attend as in transformers for a while: step by step, or by its own kernel.

    Kernels leave out, without a word, what they cannot do, such as a cap on scores.
    """
    chosen = model.config._attn_implementation
    plain = "eager" if written_out else "sdpa" if chosen == NAME else chosen
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
def _try_out(model: Any) -> Tensor:
    """Return the last hidden states [8, H] of two packed sequences."""
    token_ids = torch.tensor([5, 3, 7, 4, 4, 7, 3, 5], device=model.device)
    position_ids = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4], device=model.device)
    return hidden_states(model, token_ids, position_ids).float()


def hidden_states(model: Any, token_ids: Tensor, position_ids: Tensor) -> Tensor:
    """Return the last hidden states [N, H] of packed sequences; positions restart at 0 with each.

    Raises:
        InputError: The head of the model cannot be told from the rest of it.
    """
    if model.base_model is model:
        raise InputError(f"{type(model).__name__} names no base model, without its head")
    packed = model.config._attn_implementation == NAME
    # A tensor, since a block would be compiled anew for every list.
    more = {"sequence_ends": ends_of(position_ids)} if packed else {}
    hidden: Tensor = model.base_model(
        input_ids=token_ids[None], position_ids=position_ids[None], use_cache=False, **more
    ).last_hidden_state[0]
    return hidden


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

    positions = options.get("position_ids")
    if positions is None or len(query) != 1 or isinstance(attention_mask, Tensor):
        raise _NotOneRow("its attention is called without position_ids, or with a mask")
    if sequence_ends is None:
        sequence_ends = ends_of(positions.flatten())
    options.setdefault("is_causal", getattr(module, "is_causal", True))
    if options["is_causal"] and _has_kernel(query):
        scale = options.get("scaling")
        return _attend_at_once(query, key, value, sequence_ends, scale, attention_mask), None
    if not _shares_keys(query):
        key, value = (repeat_kv(kv, query.shape[1] // kv.shape[1]) for kv in (key, value))
        module = torch.nn.Module()  # without an attribute for groups of heads
    lengths: list[int] = sequence_ends.diff().tolist()
    columns = (torch.split(column, lengths, dim=2) for column in (query, key, value))
    outputs = []
    for part, length in zip(zip(*columns, strict=True), lengths, strict=True):
        if attention_mask is None or length <= attention_mask:
            attended, _ = sdpa_attention_forward(module, *part, None, **options)
        else:
            band = _band(length, attention_mask, query.device)
            attended, _ = sdpa_attention_forward(
                module, *part, band, **{**options, "is_causal": False}
            )
        outputs.append(attended)
    return torch.cat(outputs, dim=1), None


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

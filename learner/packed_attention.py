"""Attention of packed rows, sequence by sequence, for transformers' models on a CPU.

There transformers would make a mask of N × N for a row of N tokens and compute all of it, though a
token sees only those of its own sequence. Here each sequence of a row is given to the same kernel
alone, as plain causal attention: no mask, and no work that a mask would hide. On GPUs
`flash_attention_2` does that; so does nothing here.
"""

from typing import Any

import torch
from torch import Tensor

NAME = "headway_packed"


def use_packed_attention(model: Any) -> bool:
    """Has a model attend sequence by sequence, where that is the same and faster.

    Args:
        model: Of transformers, loaded. Changed where it computes plain causal attention by torch's
            `scaled_dot_product_attention`, and there is no GPU.

    Returns:
        Whether it was changed.
    """
    return not torch.cuda.is_available() and attend_packed(model)


def attend_packed(model: Any) -> bool:
    """As `use_packed_attention`, wherever the model is."""
    config = model.config
    if config._attn_implementation != "sdpa" or _windowed(config):
        return False
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attend)  # a name without a mask of its own gets none
    expected = _try_out(model)
    model.set_attn_implementation(NAME)
    try:
        same = torch.allclose(_try_out(model), expected, rtol=1e-2, atol=1e-2)
    except _NotOneRow:
        same = False
    if not same:
        model.set_attn_implementation("sdpa")
    return same


class _NotOneRow(Exception):
    """Attention was not told where sequences begin."""


def _windowed(config: Any) -> bool:
    """Whether some layer sees less of its sequence than everything before a token."""
    kinds = set(getattr(config, "layer_types", None) or ())
    windows = ("sliding_window", "attention_chunk_size")
    # A window that no layer type names is one of all layers.
    of_all = not kinds and any(getattr(config, name, None) for name in windows)
    return of_all or not kinds <= {"full_attention"}


@torch.no_grad()
def _try_out(model: Any) -> Tensor:
    """Last hidden states [8, H] of a row of two sequences."""
    row = torch.tensor([[5, 3, 7, 4, 4, 7, 3, 5]], device=model.device)
    places = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]], device=model.device)
    found: Tensor = model.base_model(
        input_ids=row, position_ids=places, use_cache=False
    ).last_hidden_state[0]
    return found


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention [1, N, heads, size] of a row whose sequences begin where `position_ids` are 0."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if position_ids is None or len(query) != 1 or attention_mask is not None:
        raise _NotOneRow
    lengths = _lengths(position_ids)
    columns = (torch.split(each, lengths, dim=2) for each in (query, key, value))
    parts = zip(*columns, strict=True)
    outputs = [sdpa_attention_forward(module, *part, None, **options)[0] for part in parts]
    return torch.cat(outputs, dim=1), None


def _lengths(position_ids: Tensor) -> list[int]:
    """Tokens of each sequence of a row; found once for all layers, which get the same tensor."""
    known: list[int] | None = getattr(position_ids, "_sequence_lengths", None)
    if known is None:
        starts = (position_ids.reshape(-1) == 0).nonzero().flatten().tolist()
        ends = [*starts[1:], position_ids.numel()]
        known = [end - start for start, end in zip(starts, ends, strict=True)]
        position_ids._sequence_lengths = known  # type: ignore[attr-defined]
    return known

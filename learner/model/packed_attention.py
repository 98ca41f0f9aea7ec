"""Attention of packed rows, sequence by sequence, for transformers' models.

With torch's attention transformers would make a mask of N × N for a row of N tokens and compute all
of it, though a token sees only those of its own sequence. Here each sequence of a row is given to
torch alone, as plain causal attention: no mask, and no work that a mask would hide. Models with
`flash_attention_2`, which does that itself, stay as they are.
"""

import logging
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

NAME = "headway_packed"

TOLERANCE, HALF_TOLERANCE = 0.01, 0.1
"""Largest difference, relative to the norm, that is taken for rounding: in float32, and in half
precision. A token that sees another sequence differs by about the norm."""


def attend_packed(model: Any) -> bool:
    """Has a model attend sequence by sequence, where that is the same.

    Args:
        model: Of transformers, loaded, on any device. Changed where it computes plain causal
            attention by torch's `scaled_dot_product_attention`.

    Returns:
        Whether it was changed. Where it was tried out and stays as it is, the log says why.
    """
    config = model.config
    if config._attn_implementation != "sdpa" or _windowed(config):
        return False
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attend)  # a name without a mask of its own gets none
    most = HALF_TOLERANCE if model.dtype.itemsize < 4 else TOLERANCE
    try:
        expected = _try_out(model)
        model.set_attn_implementation(NAME)
        difference = float((_try_out(model) - expected).norm() / expected.norm())
        why = "" if difference <= most else f"the results differ by {difference:.0%}"
    except (RuntimeError, ValueError, _NotOneRow) as error:  # as of layers that need a GPU
        why = str(error) or repr(error)
    if why:
        model.set_attn_implementation("sdpa")
        log.warning("%s keeps its mask over whole rows: %s", type(model).__name__, why)
    return not why


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
    return found.float()


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
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    if position_ids is None or len(query) != 1 or attention_mask is not None:
        raise _NotOneRow("its attention is not told where sequences begin")
    options.setdefault("is_causal", getattr(module, "is_causal", True))
    if not _shares_keys(query):
        key, value = (repeat_kv(each, query.shape[1] // each.shape[1]) for each in (key, value))
        module = torch.nn.Module()  # one that tells of no groups of heads
    lengths = _lengths(position_ids)
    columns = (torch.split(each, lengths, dim=2) for each in (query, key, value))
    parts = zip(*columns, strict=True)
    outputs = [sdpa_attention_forward(module, *part, None, **options)[0] for part in parts]
    return torch.cat(outputs, dim=1), None


def _shares_keys(query: Tensor) -> bool:
    """Whether torch lets several heads of queries share one of keys without a matrix of scores.

    On GPUs it has kernels for that in half precision alone.
    """
    return query.device.type == "cpu" or query.dtype != torch.float32


def _lengths(position_ids: Tensor) -> list[int]:
    """Tokens of each sequence of a row; found once for all layers, which get the same tensor."""
    known: list[int] | None = getattr(position_ids, "_sequence_lengths", None)
    if known is None:
        starts = (position_ids.reshape(-1) == 0).nonzero().flatten().tolist()
        ends = [*starts[1:], position_ids.numel()]
        known = [end - start for start, end in zip(starts, ends, strict=True)]
        position_ids._sequence_lengths = known  # type: ignore[attr-defined]
    return known

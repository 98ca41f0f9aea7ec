"""Weights of tokens in the loss: loss = Σ weights · per_token.

Denominators count the whole batch, so that neither packing, microbatches nor ranks change the
gradient.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from headway.errors import InputError

Mode = Literal["token_mean", "sequence_mean", "prompt_mean", "fixed_length"]


@dataclass(frozen=True)
class Totals:
    """Counts over a whole batch; ids are those of `sequence_ids` and `group_ids`."""

    tokens: int
    """Tokens that train (N)."""
    sequences: int
    """Sequences, whether any of their tokens trains or not (B)."""
    sequence_tokens: Mapping[int, int]
    """Tokens that train, of each sequence that has any (n_i)."""
    group_tokens: Mapping[int, int]
    """Tokens that train, of each group that has any (N_p); empty without groups."""


def count(mask: Tensor, sequence_ids: Tensor, group_ids: Tensor | None = None) -> Totals:
    """Count the batch that the three [N] tensors describe."""
    return Totals(
        tokens=int(mask.sum()),
        sequences=len(torch.unique(sequence_ids)),
        sequence_tokens=count_values(sequence_ids[mask]),
        group_tokens={} if group_ids is None else count_values(group_ids[mask]),
    )


def token_weights(
    mode: str,
    mask: Tensor,
    sequence_ids: Tensor,
    group_ids: Tensor | None = None,
    *,
    totals: Totals | None = None,
    max_length: int | None = None,
) -> Tensor:
    """Return the weight of each token in the loss, [N] float32, 0 where `mask` is false.

    token_mean     1 / N                  every token the same (DAPO as implemented)
    sequence_mean  1 / (B′ · n_i)         every sequence the same (GRPO); B′: with tokens to train
    prompt_mean    1 / (P · N_p)          every prompt the same (ScaleRL; DAPO eq. 8 as written)
    fixed_length   1 / (B · max_length)   a constant (Dr. GRPO)

    Args:
        mode: One of the four.
        mask: [N] bool, tokens that train.
        sequence_ids: [N] integers.
        group_ids: [N] integers; needed by prompt_mean.
        totals: Counts over the batch of which these N tokens are a part; None: they are the batch.
        max_length: Largest response in tokens; needed by fixed_length.

    Raises:
        InputError: An unknown mode, or one without what it needs.
    """
    if mode not in get_args(Mode):
        raise InputError(f"aggregation {mode!r} is not one of {', '.join(get_args(Mode))}")
    if mode == "prompt_mean" and group_ids is None:
        raise InputError("aggregation prompt_mean needs group_ids")
    totals = totals or count(mask, sequence_ids, group_ids)
    match cast("Mode", mode):
        case "token_mean":
            denominators = torch.full(mask.shape, float(totals.tokens))
        case "sequence_mean":
            denominators = _spread(totals.sequence_tokens, sequence_ids)
        case "prompt_mean":
            denominators = _spread(totals.group_tokens, cast("Tensor", group_ids))
        case "fixed_length":
            if max_length is None or max_length < 1:
                raise InputError(f"aggregation fixed_length needs max_length >= 1: {max_length}")
            denominators = torch.full(mask.shape, float(totals.sequences * max_length))
    weights = 1 / denominators.double().clamp(min=1).to(mask.device)
    return torch.where(mask, weights, 0.0).float()


def count_values(integers: Tensor) -> dict[int, int]:
    """Return how often each of some integers [N] occurs, by ascending integer."""
    values, counts = torch.unique(integers, return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def _spread(tokens: Mapping[int, int], ids: Tensor) -> Tensor:
    """Return for each token the count of its sequence or group, times the number of counts."""
    values, inverse = torch.unique(ids, return_inverse=True)
    counts = torch.tensor([tokens.get(value, 0) for value in values.tolist()])
    return len(tokens) * counts[inverse.cpu()]

"""Weights of tokens in the loss: loss = Σ weights · per_token.

Denominators count the whole batch, so that neither packing, microbatches nor ranks change the
gradient.
"""

import torch
from torch import Tensor

from learner.errors import InputError

MODES = ("token_mean", "sequence_mean", "prompt_mean", "fixed_length")


def token_weights(
    mode: str,
    mask: Tensor,
    sequence_ids: Tensor,
    group_ids: Tensor | None = None,
    *,
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
        max_length: Largest response in tokens; needed by fixed_length.

    Raises:
        InputError: An unknown mode, or one without what it needs.
    """
    match mode:
        case "token_mean":
            denominators = torch.full(mask.shape, float(mask.sum()), device=mask.device)
        case "sequence_mean":
            denominators = _spread(mask, sequence_ids)
        case "prompt_mean":
            if group_ids is None:
                raise InputError("aggregation prompt_mean needs group_ids")
            denominators = _spread(mask, group_ids)
        case "fixed_length":
            if max_length is None or max_length < 1:
                raise InputError(f"aggregation fixed_length needs max_length >= 1: {max_length}")
            tokens = float(len(torch.unique(sequence_ids)) * max_length)
            denominators = torch.full(mask.shape, tokens, device=mask.device)
        case _:
            raise InputError(f"aggregation {mode!r} is not one of {', '.join(MODES)}")
    return torch.where(mask, 1 / denominators.double().clamp(min=1), 0.0).float()


def _spread(mask: Tensor, ids: Tensor) -> Tensor:
    """Return the masked-in tokens of each token's id, times the number of ids with any, [N]."""
    values, index = torch.unique(ids, return_inverse=True)
    counts = torch.bincount(index[mask], minlength=len(values))
    return (counts > 0).sum() * counts[index]

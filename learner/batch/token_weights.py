"""Weights of tokens in the loss: loss = Σ weights · per_token."""

import torch
from torch import Tensor

from headway.errors import InputError

MODES = ("token_mean", "sequence_mean", "prompt_mean", "fixed_length")


def token_weights(
    mode: str,
    mask: Tensor,
    sequence_ids: Tensor,
    group_ids: Tensor | None = None,
    *,
    max_length: int | None = None,
) -> Tensor:
    """Return the weight of each token of a batch in the loss, [N] float32, 0 where not `mask`.

    Denominators count what is given: all tokens of the minibatch, those of other ranks too.

    token_mean     1 / N                  every token the same (DAPO as implemented)
    sequence_mean  1 / (B′ · n_i)         every sequence the same (GRPO); B′: with tokens to train
    prompt_mean    1 / (P · N_p)          every prompt the same (ScaleRL; DAPO eq. 8 as written)
    fixed_length   1 / (B · max_length)   a constant (Dr. GRPO)

    Args:
        mode: One of the four.
        mask: [N] bool, tokens that train.
        sequence_ids: [N] integers; B counts them, whether any of their tokens trains or not.
        group_ids: [N] integers; needed by prompt_mean.
        max_length: Largest response in tokens; needed by fixed_length.

    Raises:
        InputError: An unknown mode, or one without what it needs.
    """
    match mode:
        case "token_mean":
            denominators = torch.full(mask.shape, float(mask.sum()))
        case "sequence_mean":
            denominators = _spread(sequence_ids, mask)
        case "prompt_mean":
            if group_ids is None:
                raise InputError("aggregation prompt_mean needs group_ids")
            denominators = _spread(group_ids, mask)
        case "fixed_length":
            if max_length is None or max_length < 1:
                raise InputError(f"aggregation fixed_length needs max_length >= 1: {max_length}")
            sequences = len(torch.unique(sequence_ids))
            denominators = torch.full(mask.shape, float(sequences * max_length))
        case _:
            raise InputError(f"aggregation {mode!r} is not one of {', '.join(MODES)}")
    weights = 1 / denominators.double().clamp(min=1).to(mask.device)
    return torch.where(mask, weights, 0.0).float()


def count_values(integers: Tensor) -> dict[int, int]:
    """Return how often each of some integers [N] occurs, by ascending integer."""
    values, counts = torch.unique(integers, return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def _spread(ids: Tensor, mask: Tensor) -> Tensor:
    """Return for each token the masked-in tokens of its id, times the number of ids that have any.

    Of shape [N] int64.
    """
    _, inverse = torch.unique(ids, return_inverse=True)
    counts = torch.bincount(inverse[mask], minlength=int(inverse.max()) + 1 if len(ids) else 0)
    return int((counts > 0).sum()) * counts[inverse]

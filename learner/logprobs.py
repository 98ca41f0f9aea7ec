"""Log-probabilities and entropies of tokens without ever holding the logits of all of them.

The head is applied chunk by chunk, and once more in the backward pass; between the two only one
number per token is kept. Exact: no approximation, and the gradient is the analytic one.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from learner.errors import InputError


def chunked_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float, chunk: int
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target, log softmax(hidden · weightᵀ / temperature), and entropy.

    Logits are formed in the dtype of the weights, as engines form them; everything after is float32
    (float64 for float64 inputs). At most `chunk · V` logits exist at a time.

    Args:
        hidden: [N, H] last hidden states; differentiable.
        weight: [V, H] of the language-model head; differentiable.
        targets: [N] int64; `targets[i]` is the token that `hidden[i]` predicts.
        temperature: Divides the logits, as the engine does when it samples.
        chunk: Positions at a time.

    Returns:
        Log-probabilities [N] with gradient, and entropies [N] in nats, detached.

    Raises:
        InputError: A temperature or chunk that is not positive.
    """
    if temperature <= 0 or chunk < 1:
        raise InputError(
            f"temperature must be above 0 and chunk at least 1, found {temperature} and {chunk}"
        )
    result = _ChunkedLogprobs.apply(hidden, weight, targets, temperature, chunk)  # type: ignore[no-untyped-call]
    return cast("tuple[Tensor, Tensor]", result)


class _ChunkedLogprobs(torch.autograd.Function):
    """z = h·Wᵀ/T; log p = z_y − logsumexp z; H = logsumexp z − Σ softmax(z)·z.

    ∂ log p / ∂z = onehot(y) − softmax(z).
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logprobs, entropies, normalisers = hidden.new_empty(3, len(targets), dtype=wide).unbind()
        for at in _chunks(len(targets), chunk):
            logits = _logits(hidden[at], weight, temperature)
            normaliser = logits.logsumexp(-1)
            normalisers[at] = normaliser
            logprobs[at] = logits.gather(-1, targets[at, None]).squeeze(-1) - normaliser
            probabilities = (logits - normaliser[:, None]).exp()
            # A logit of −inf has probability 0 and adds nothing, where 0 · −inf would be nan.
            entropies[at] = normaliser - (probabilities * logits).nan_to_num(nan=0.0).sum(-1)
        ctx.save_for_backward(hidden, weight, targets, normalisers)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient: Tensor, _entropy_gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, targets, normalisers = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        hidden_gradient = torch.empty_like(hidden) if wants_hidden else None
        weight_gradient = torch.zeros_like(weight, dtype=gradient.dtype) if wants_weight else None
        for at in _chunks(len(targets), ctx.chunk):
            logits = _logits(hidden[at], weight, ctx.temperature)
            logits_gradient = (logits - normalisers[at, None]).exp().neg()
            logits_gradient.scatter_add_(
                -1, targets[at, None], torch.ones_like(logits_gradient[:, :1])
            )
            logits_gradient *= gradient[at, None] / ctx.temperature
            narrow = logits_gradient.to(weight.dtype)
            if hidden_gradient is not None:
                hidden_gradient[at] = narrow @ weight
            if weight_gradient is not None:
                weight_gradient += narrow.T @ hidden[at]
        if weight_gradient is not None:
            weight_gradient = weight_gradient.to(weight.dtype)
        return hidden_gradient, weight_gradient, None, None, None


def _chunks(length: int, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, length, chunk)]


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    logits = hidden @ weight.T
    return (logits if logits.dtype == torch.float64 else logits.float()) / temperature

"""Sums over the words of a vocabulary and their gradient, each one compiled pass over the logits.

torch sees both as operators of its own: they can be counted and sized without being computed. The
formulas are those of `logprobs`; `form` is (temperature, scale) or (temperature, scale, cap).
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


@torch.library.custom_op("headway::word_sums", mutates_args=())
def word_sums(
    products: Tensor, targets: Tensor, form: Sequence[float]
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute log-probabilities of targets [n] or [n, K], entropies [n], normalisers [n], float32.

    `products` [n, V] are those of hidden states and weights; float64 ones give float64.
    """
    results: tuple[Tensor, Tensor, Tensor] = _compute(_sums, products, targets, form)
    return results


@word_sums.register_fake
def _(products: Tensor, targets: Tensor, form: Sequence[float]) -> tuple[Tensor, Tensor, Tensor]:
    empty = products.new_empty(len(products), dtype=_wide(products))
    return empty.new_empty(targets.shape), empty, torch.empty_like(empty)


@torch.library.custom_op("headway::word_gradient", mutates_args=())
def word_gradient(
    products: Tensor,
    targets: Tensor,
    normalisers: Tensor,
    entropies: Tensor,
    gradients: Sequence[Tensor],
    form: Sequence[float],
) -> Tensor:
    """Compute the gradient [n, V] of `products`, in their dtype, from what `word_sums` returned.

    `gradients` are those of the log-probabilities, of the shape of `targets`, and, if they have
    one, of the entropies [n].
    """
    arguments = products, targets, normalisers, entropies, gradients, form
    result: Tensor = _compute(_gradient, *arguments)
    return result


@word_gradient.register_fake
def _(products: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(products)


def _compute(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function that is compiled once for every number of tokens."""
    for leaf in tree_leaves(arguments):
        if isinstance(leaf, Tensor):
            torch._dynamo.maybe_mark_dynamic(leaf, 0)
    return _compiled(function)(*arguments)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


def _sums(
    products: Tensor, targets: Tensor, form: Sequence[float]
) -> tuple[Tensor, Tensor, Tensor]:
    scores = _bent(products, form) / form[0]
    largest = scores.amax(-1)
    shifted = scores - largest[:, None]
    powers = shifted.exp()
    total = powers.sum(-1)
    # A logit of −inf has probability 0 and adds nothing, but 0 · −inf is nan.
    expected = torch.where(shifted == -torch.inf, 0.0, powers * shifted).sum(-1) / total
    log_total = total.log()
    logprobs = shifted.gather(-1, targets.view(len(targets), -1)) - log_total[:, None]
    return logprobs.view(targets.shape), log_total - expected, largest + log_total


def _gradient(
    products: Tensor,
    targets: Tensor,
    normalisers: Tensor,
    entropies: Tensor,
    gradients: Sequence[Tensor],
    form: Sequence[float],
) -> Tensor:
    temperature, scale, *cap = form
    bent = _bent(products, form)
    scores = bent / temperature - normalisers[:, None]
    probabilities = scores.exp()
    given = gradients[0].reshape(len(targets), -1)
    pull = given.sum(-1, keepdim=True)
    if len(gradients) == 2:
        pull = pull + (scores + entropies[:, None]) * gradients[1][:, None]
        pull = torch.where(probabilities == 0, 0.0, pull)
    if targets.dim() == 1:  # without a tensor of its own
        words = torch.arange(products.shape[1], device=products.device)
        drawn = torch.where(words == targets[:, None], given, 0.0)
    else:
        drawn = torch.zeros_like(scores).scatter_add(-1, targets, given)
    slope = scale * (1 - (bent / cap[0]).square()) if cap else scale
    return ((drawn - probabilities * pull) * (slope / temperature)).to(products.dtype)


def _bent(products: Tensor, form: Sequence[float]) -> Tensor:
    _, scale, *cap = form
    logits = products.to(_wide(products))
    return cap[0] * (logits * (scale / cap[0])).tanh() if cap else logits * scale


def _wide(products: Tensor) -> torch.dtype:
    return torch.float64 if products.dtype == torch.float64 else torch.float32

"""Log-probabilities and entropies of tokens, without holding the logits of all of them at once.

The head is applied chunk by chunk, and again in the backward pass; between the two only two numbers
per token are kept. Nothing is approximated, and the gradient is the analytic one.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from learner.model.word_sums import word_gradient, word_sums

WORDS_AT_A_TIME = 8192
"""Rows of the head that a float32 head holds in float32 at a time."""


@dataclass(frozen=True, kw_only=True)
class LogprobOptions:
    """Options of computing log-probabilities from hidden states."""

    chunk: int
    """Positions whose logits are held at once."""
    temperature: float = 1.0
    """Divides the logits, as the engine does when it samples."""
    entropy_gradient: bool = False
    """Entropies carry a gradient too."""
    float32_head: bool = False
    """Multiply hidden states, weights and gradients in float32 whatever their dtype."""
    scale: float = 1.0
    """Multiplies the products of hidden states and weights, as the model does."""
    cap: float | None = None
    """Bends what is scaled to cap · tanh(· / cap), as the model does; None: logits stay."""
    compiled: bool = False
    """Sum over the words by compiled kernels, which read the logits once; else in place."""

    @property
    def form(self) -> list[float]:
        """Temperature, scale and the cap, if there is one, as `word_sums` takes them."""
        return [self.temperature, self.scale, *([] if self.cap is None else [self.cap])]


def chunked_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, options: LogprobOptions
) -> tuple[Tensor, Tensor]:
    """Compute log softmax(z / temperature) of each target, and the entropy.

    z = hidden · weightᵀ, scaled and capped as `options` have it. These products are formed in the
    dtype of the weights, as engines form them; everything after is float32 (float64 for float64
    inputs). At most `chunk · V` logits exist at a time.

    Args:
        hidden: [N, H] last hidden states; differentiable.
        weight: [V, H] of the language-model head; differentiable.
        targets: [N] or [N, K] int64; `targets[i]` are tokens that `hidden[i]` may predict.
        options: Temperature, chunk, and what is differentiated.

    Returns:
        Log-probabilities, of the shape of `targets`, with gradient, and entropies [N] in nats,
        detached unless asked for.
    """
    result = _ChunkedLogprobs.apply(hidden, weight, targets, options)  # type: ignore[no-untyped-call]
    return cast("tuple[Tensor, Tensor]", result)


@torch.no_grad()
def likeliest_words(
    hidden: Tensor, weight: Tensor, count: int, words: int, options: LogprobOptions
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of the likeliest tokens, and these tokens, the first likeliest.

    They are `count` of the first `words` of the vocabulary, or all of those, [N, K] each: float32
    (float64 for float64 inputs) and int64. Log-probabilities are those of `chunked_logprobs`.
    """
    head, count = _Head(weight, options), min(count, words, len(weight))
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    logprobs = hidden.new_empty(len(hidden), count, dtype=dtype)
    chosen = torch.empty_like(logprobs, dtype=torch.int64)
    buffer = hidden.new_empty(min(options.chunk, len(hidden)), len(weight), dtype=dtype)
    for at in _chunks(len(hidden), options.chunk):
        logits = head.logits(hidden[at], out=buffer[: len(hidden[at])])
        logits = bend(logits, options)
        logits.sub_(logits.amax(-1, keepdim=True)).div_(options.temperature)
        likeliest = logits[:, :words].topk(count)
        logprobs[at] = likeliest.values - logits.logsumexp(-1, keepdim=True)
        chosen[at] = likeliest.indices
    return logprobs, chosen


class _ChunkedLogprobs(torch.autograd.Function):
    """z = c·tanh(s·h·Wᵀ/c)/T, p = softmax(z), log p_y = z_y − logsumexp z, H = −Σ p·log p.

    ∂ log p_y / ∂z = onehot(y) − p, and ∂H / ∂z = −p·(log p + H). Without a cap, z = s·h·Wᵀ/T.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, options: LogprobOptions
    ) -> tuple[Tensor, Tensor]:
        head = _Head(weight, options)
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logprobs = hidden.new_empty(targets.shape, dtype=dtype)
        entropies, normalisers = hidden.new_empty(2, len(targets), dtype=dtype).unbind()
        buffers = _buffers(hidden, weight, dtype, options)
        for at in _chunks(len(targets), options.chunk):
            if options.compiled:
                sums = word_sums(head.products(hidden[at]), targets[at], options.form)
            else:
                logits_buffer, buffer = buffers[:, : len(targets[at])]
                logits = head.logits(hidden[at], out=logits_buffer)
                sums = _sums_in_place(logits, targets[at], options, buffer)
            logprobs[at], entropies[at], normalisers[at] = sums
        ctx.save_for_backward(hidden, weight, targets, normalisers, entropies)
        ctx.options = options
        if not options.entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, entropy_gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normalisers, entropies = ctx.saved_tensors
        options = ctx.options
        head = _Head(weight, options)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        hidden_gradient = torch.empty_like(hidden) if wants_hidden else None
        weight_gradient = torch.zeros_like(weight, dtype=gradient.dtype) if wants_weight else None
        upstream = [gradient, entropy_gradient] if options.entropy_gradient else [gradient]
        buffers = _buffers(hidden, weight, gradient.dtype, options)
        for at in _chunks(len(targets), options.chunk):
            tokens = (
                targets[at],
                normalisers[at],
                entropies[at],
                [column[at] for column in upstream],
            )
            if options.compiled:
                per_score = word_gradient(head.products(hidden[at]), *tokens, options.form)
            else:
                logits_buffer, buffer = buffers[:, : len(targets[at])]
                logits = head.logits(hidden[at], out=logits_buffer)
                per_score = head.narrow(_gradient_in_place(logits, *tokens, options, buffer))
            if hidden_gradient is not None:
                hidden_gradient[at] = head.to_hidden(per_score)
            if weight_gradient is not None:
                head.add_to_weight(weight_gradient, per_score, hidden[at])
        if weight_gradient is not None:
            weight_gradient = weight_gradient.to(weight.dtype)
        return hidden_gradient, weight_gradient, None, None


class _Head:
    """Products with the head's weights [V, H], in their dtype or, slice by slice, in float32.

    A float32 copy of all weights would be the largest tensor of a step.
    """

    def __init__(self, weight: Tensor, options: LogprobOptions) -> None:
        self._weight = weight
        self._wide = options.float32_head and weight.dtype.itemsize < 4
        self._sums_in_float32 = options.compiled and weight.device.type != "cpu"

    def products(self, hidden: Tensor) -> Tensor:
        """Return hidden · Wᵀ [n, V] in the dtype that a gradient of the logits is passed on in."""
        if not self._wide:
            return hidden @ self._weight.T
        shape = len(hidden), len(self._weight)
        return self.logits(hidden, out=hidden.new_empty(shape, dtype=torch.float32))

    def logits(self, hidden: Tensor, *, out: Tensor) -> Tensor:
        """Compute the logits hidden · Wᵀ into `out` [n, V], which is float32 or float64."""
        if out.dtype == self._weight.dtype:
            return torch.mm(hidden, self._weight.T, out=out)
        if not self._wide:
            return out.copy_(hidden @ self._weight.T)
        for words in self._slices():
            wide = self._weight[words].T
            if hidden.is_cuda:
                out[:, words] = torch.mm(hidden, wide, out_dtype=torch.float32)
            else:
                torch.mm(hidden.float(), wide.float(), out=out[:, words])
        return out

    def narrow(self, gradient: Tensor) -> Tensor:
        """Return a gradient [n, V] of the logits in the dtype that it is multiplied in."""
        return gradient if self._wide else gradient.to(self._weight.dtype)

    def to_hidden(self, gradient: Tensor) -> Tensor:
        """Return the product of a gradient [n, V] of the logits with W, [n, H]."""
        if not self._wide:
            return gradient @ self._weight
        total = gradient.new_zeros(len(gradient), self._weight.shape[1])
        for words in self._slices():
            wide, product = self._weight[words], gradient[:, words]
            if product.is_cuda:
                total += on_tensor_cores(product, wide)
            else:
                total += product @ wide.float()
        return total

    def add_to_weight(self, total: Tensor, gradient: Tensor, hidden: Tensor) -> None:
        """Add gradientᵀ · hidden to `total` [V, H]."""
        if total.dtype == self._weight.dtype:
            total.addmm_(gradient.T, hidden)  # with no product [V, H] beside the total
        elif not self._wide and self._sums_in_float32:
            torch.addmm(total, gradient.T, hidden, out_dtype=total.dtype, out=total)
        elif not self._wide:
            total += gradient.T @ hidden
        else:
            for words in self._slices():
                product = gradient[:, words].T
                if product.is_cuda:
                    total[words] += on_tensor_cores(product, hidden)
                else:
                    total[words].addmm_(product, hidden.float())

    def _slices(self) -> list[slice]:
        return _chunks(len(self._weight), WORDS_AT_A_TIME)


def on_tensor_cores(first: Tensor, second: Tensor) -> Tensor:
    """Multiply a float32 matrix by one of half precision, in float32, as GPUs do it fast.

    Products of bfloat16 that are summed in float32 lose nothing, and a float32 number is the sum of
    three of bfloat16 to its own precision. Other GPU paths would take several times as long.
    """
    rest, total = first, first.new_zeros(len(first), second.shape[1])
    for _ in range(3):
        part = rest.to(second.dtype)
        total += torch.mm(part, second, out_dtype=torch.float32)
        rest = rest - part.float()
    return total


def bend(logits: Tensor, options: LogprobOptions) -> Tensor:
    """Scale and cap products of hidden states and weights [n, V] as a model does, in place."""
    if options.cap is not None:
        return logits.mul_(options.scale / options.cap).tanh_().mul_(options.cap)
    return logits if options.scale == 1 else logits.mul_(options.scale)


def _slope(logits: Tensor, options: LogprobOptions) -> Tensor | float | None:
    """Return the derivative of bent logits [n, V] by what they were; None where it is 1."""
    if options.cap is not None:
        return (1 - (logits / options.cap).square()).mul_(options.scale)
    return None if options.scale == 1 else options.scale


def _shift(logits: Tensor, temperature: float, *, by: Tensor) -> Tensor:
    """Compute logits / temperature − by in place, of logits [n, V] and `by` [n], in one pass."""
    return torch.add(-by[:, None], logits, alpha=1 / temperature, out=logits)


def _sums_in_place(
    logits: Tensor, targets: Tensor, options: LogprobOptions, buffer: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what `word_sums` does, of logits [n, V] in float32 or float64, which are spent."""
    logits = bend(logits, options)
    largest = logits.amax(-1) / options.temperature
    shifted = _shift(logits, options.temperature, by=largest)
    powers = torch.exp(shifted, out=buffer)
    total = powers.sum(-1)
    log_total = total.log()
    chosen = shifted.gather(-1, targets.view(len(targets), -1)) - log_total[:, None]
    # A logit of −inf has probability 0 and adds nothing, but 0 · −inf is nan.
    expected = powers.mul_(shifted).nansum(-1)
    return chosen.view_as(targets), log_total - expected / total, largest + log_total


def _gradient_in_place(  # noqa: PLR0913  (what `word_gradient` takes, and a buffer)
    logits: Tensor,
    targets: Tensor,
    normalisers: Tensor,
    entropies: Tensor,
    gradients: list[Tensor],
    options: LogprobOptions,
    buffer: Tensor,
) -> Tensor:
    """Compute what `word_gradient` does, of logits [n, V] in float32 or float64, in `buffer`."""
    logits = bend(logits, options)
    slope = _slope(logits, options)
    scores = _shift(logits, options.temperature, by=normalisers)
    probabilities = torch.exp(scores, out=buffer)
    gradient, *of_entropies = (
        column.reshape(len(targets), -1) / options.temperature for column in gradients
    )
    pull = -gradient.sum(-1, keepdim=True)
    if of_entropies:
        pull = scores.add_(entropies[:, None]).mul_(-of_entropies[0]).add_(pull)
        pull.masked_fill_(probabilities == 0, 0.0)
    per_score = probabilities.mul_(pull)
    per_score.scatter_add_(-1, targets.view(len(targets), -1), gradient)
    return per_score if slope is None else per_score.mul_(slope)


def _buffers(hidden: Tensor, weight: Tensor, dtype: torch.dtype, options: LogprobOptions) -> Tensor:
    """Return buffers for two chunks of logits [2, chunk, V], allocated once for all chunks.

    Compiled kernels need none.
    """
    length = 0 if options.compiled else min(options.chunk, len(hidden))
    return hidden.new_empty(2, length, len(weight), dtype=dtype)


def _chunks(length: int, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, length, chunk)]

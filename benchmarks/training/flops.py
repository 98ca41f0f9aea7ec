"""Floating-point operations of training, and the best rate of a matrix product of the machine."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

SIZES = {"cpu": (768, 1536, 3072), "cuda": (4096, 8192, 12288)}
"""Sides of the square matrices whose best product is the peak."""
PEAK_SECONDS = 0.4
"""Duration of the measurement of each size."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The parts of a model that multiply matrices."""

    matrices: int
    """Elements of all projections of all layers, without embedding and output embedding."""
    head: int
    """Elements of the output embedding, tied or not."""
    layers: int
    attention_width: int
    """Query heads times the size of each."""


def shape_of(model: Any) -> Shape:
    """Return the shape of a causal language model of transformers, with plain attention."""
    config = model.config
    head_size = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    ends = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    return Shape(
        matrices=sum(p.numel() for p in model.parameters() if p.ndim == 2 and id(p) not in ends),
        head=model.get_output_embeddings().weight.numel(),
        layers=config.num_hidden_layers,
        attention_width=config.num_attention_heads * head_size,
    )


def training_flops(shape: Shape, lengths: Sequence[int], scored: int | None = None) -> float:
    """Return the operations that a forward and a backward pass over some sequences need.

    A product with a matrix of P elements is 2·P operations a token, and its backward pass twice as
    many (PaLM, arXiv 2204.02311, appendix B: 6·P a token). Scores and values of attention are
    4·width operations for each pair of a query and a key that it may see, n·(n + 1) / 2 pairs of a
    sequence of n tokens, three times for both passes. Nothing else counts: no look-up of
    embeddings, norms, activations, softmax or optimizer; and nothing that is computed twice, as the
    output embedding is in the backward pass here, nor padding, nor what a mask hides.

    Args:
        shape: Of the model.
        lengths: Tokens of each sequence.
        scored: Tokens whose log-probability is computed; None: all.

    Example:
        >>> training_flops(Shape(matrices=10, head=5, layers=1, attention_width=2), [3])
        414.0
        >>> training_flops(Shape(matrices=10, head=5, layers=1, attention_width=2), [3], scored=2)
        384.0
    """
    tokens = sum(lengths)
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    products = 6 * (shape.matrices * tokens + shape.head * (tokens if scored is None else scored))
    attention = 12 * shape.layers * shape.attention_width * pairs
    return float(products + attention)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Peak:
    """The best rate of a matrix product, in operations a second."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, sizes: Sequence[int] | None = None
    ) -> None:
        """Make the matrices.

        Args:
            device: Device of the matrices.
            dtype: Of the matrices.
            sizes: Their sides; None takes `SIZES` of the device.
        """
        self._device = device
        self._pairs = [
            torch.randn(2, size, size, device=device).to(dtype)
            for size in sizes or SIZES[device.type]
        ]
        self.measure()  # warms up

    def measure(self) -> float:
        """Return the best rate over sizes and repetitions, with as many threads as torch has."""
        return max(self._rate(left, right) for left, right in self._pairs)

    def _rate(self, left: torch.Tensor, right: torch.Tensor) -> float:
        operations = 2 * len(left) ** 3
        best, until = 0.0, time.perf_counter() + PEAK_SECONDS
        product = torch.empty_like(left)
        while time.perf_counter() < until:
            synchronize(self._device)
            begin = time.perf_counter()
            torch.mm(left, right, out=product)
            synchronize(self._device)
            best = max(best, operations / (time.perf_counter() - begin))
        return best

"""Utilisation of a machine by a learner: operations, the best matrix product, and a clock."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.synthetic_load import Size, build, lengths_of, sampled_tokens, synchronize
from learner.engine.protocol import TrainEngine
from learner.update import Updater
from queues.records import RolloutGroup

PARTS = ("forward", "backward", "step")
"""Methods of an engine that compute."""
SHARES = (*PARTS, "between", "host")
SIDES = {"cpu": (768, 1536, 3072), "cuda": (4096, 8192, 12288)}
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
    """Return the operations that a forward and a backward pass over sequences of some lengths need.

    A product with a matrix of P elements is 2·P operations a token, and its backward pass twice as
    many (PaLM, arXiv 2204.02311, appendix B: 6·P a token). Scores and values of attention are
    4·width operations for each pair of a query and a key that it may see, n·(n + 1) / 2 pairs of a
    sequence of n tokens, three times for both passes. Nothing else counts: no embedding, norm,
    activation, softmax or optimizer; nothing that is computed twice, as the output embedding is in
    the backward pass here; nor padding, nor what a mask hides. Log-probabilities of `scored` tokens
    are computed; None: of all.
    """
    tokens = sum(lengths)
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    products = 6 * (shape.matrices * tokens + shape.head * (tokens if scored is None else scored))
    attention = 12 * shape.layers * shape.attention_width * pairs
    return float(products + attention)


class Peak:
    """The best rate of a matrix product, in operations a second."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._pairs = [
            torch.randn(2, side, side, device=device).to(dtype) for side in SIDES[device.type]
        ]
        self.measure()  # warms up

    def measure(self) -> float:
        """Return the best rate over sizes and repetitions, with as many threads as torch has."""
        return max(self._rate(left, right) for left, right in self._pairs)

    def _rate(self, left: Tensor, right: Tensor) -> float:
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


class ClockedEngine:
    """A `TrainEngine` that notes the seconds of each call, and the first and last time of any.

    Waits for the device after every call, so that seconds belong to the call that made the work.
    """

    def __init__(self, engine: TrainEngine, device: torch.device) -> None:
        self._engine, self.device = engine, device
        self.restart()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._engine, name)
        return partial(self._timed, name, value) if name in PARTS else value

    def restart(self) -> None:
        """Forget everything that was noted."""
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.first: float | None = None
        self.last = 0.0

    def _timed(self, part: str, call: Callable[..., Any], *arguments: Any) -> Any:
        begin = time.perf_counter()
        if self.first is None:
            self.first = begin
        result = call(*arguments)
        synchronize(self.device)
        self.last = time.perf_counter()
        self.seconds[part] += self.last - begin
        return result


def utilisation_of(
    updater: Updater,
    engine: ClockedEngine,
    size: Size,
    groups: Sequence[RolloutGroup],
    read: Callable[[], Sequence[RolloutGroup]],
    *,
    rounds: int,
) -> dict[str, Any]:
    """Return the parameters of a model, and `figures_of` its training on the batch that is read."""
    peak = Peak(engine.device, getattr(torch, size.dtype))
    timed = timed_rounds(updater, engine, read, peak, rounds)
    with torch.device("meta"):
        model = build(size)
    lengths = lengths_of(groups)
    flops = training_flops(shape_of(model), lengths, sampled_tokens(groups))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"parameters": parameters, **figures_of(timed, flops, sum(lengths))}


def timed_rounds(
    updater: Updater,
    engine: ClockedEngine,
    read: Callable[[], Sequence[RolloutGroup]],
    peak: Peak,
    rounds: int,
) -> list[dict[str, float]]:
    """Train the batch that `read` returns; return the seconds of each time and of its parts.

    A first time, which touches fresh memory, is left out. `host` is the time outside the first
    forward pass and the end of the last optimizer step: reading the batch, advantages, packing,
    statistics. `between` is the time inside that belongs to none of the three parts: cutting
    microbatches, and losses. `peak` and `peak_after` are the best matrix product before and after
    it, in operations/s.
    """
    timed, before = [], 0.0
    for version in range(rounds + 1):
        engine.restart()
        begin, cpu = time.perf_counter(), time.process_time()
        updater.update(read(), version)
        total, cpu = time.perf_counter() - begin, time.process_time() - cpu
        assert engine.first is not None
        computing = engine.last - engine.first
        between = computing - sum(engine.seconds.values())
        row = {"seconds": total, "cpu_seconds": cpu, **engine.seconds}
        row |= {"between": between, "host": total - computing}
        after = peak.measure()
        timed.append(row | {"peak": before, "peak_after": after})
        before = after
    return timed[1:]


def figures_of(rounds: Sequence[Mapping[str, float]], flops: float, tokens: int) -> dict[str, Any]:
    """Return medians over `timed_rounds` of a batch of so many operations and tokens."""
    peaks = [(row["peak"] + row["peak_after"]) / 2 for row in rounds]
    return {
        "tokens": tokens,
        "flops": flops,
        "tokens_per_second": median(tokens / row["seconds"] for row in rounds),
        "peak": median(peaks),
        "utilisation": median(
            flops / row["seconds"] / peak for row, peak in zip(rounds, peaks, strict=True)
        ),
        "cpu": median(row["cpu_seconds"] / row["seconds"] for row in rounds),
        "shares": {part: median(row[part] / row["seconds"] for row in rounds) for part in SHARES},
        "raw": rounds,
    }

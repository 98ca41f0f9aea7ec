"""A clock around a training engine: when a learner computes, and when it does something else."""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.training.flops import Peak, synchronize
from learner.engine.protocol import Forward, TrainEngine
from learner.update import Updater
from queues.records import RolloutGroup

PARTS = ("forward", "backward", "step")
SHARES = (*PARTS, "between", "host")


class ClockedEngine:
    """A `TrainEngine` that notes the seconds of each call, and the first and last time of any.

    Waits for the device after every call, so that seconds belong to the call that made the work.
    """

    def __init__(self, engine: TrainEngine, device: torch.device) -> None:
        self._engine, self.device = engine, device
        self.restart()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

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

    def forward(
        self, token_ids: Tensor, position_ids: Tensor, wanted: Tensor | None = None
    ) -> Forward:
        """See `TrainEngine`."""
        result: Forward = self._timed(
            "forward", self._engine.forward, token_ids, position_ids, wanted
        )
        return result

    def backward(self, loss: Tensor) -> None:
        """See `Trainable`."""
        self._timed("backward", self._engine.backward, loss)

    def step(self) -> float:
        """See `Trainable`."""
        norm: float = self._timed("step", self._engine.step)
        return norm


def timed_update(
    updater: Updater,
    engine: ClockedEngine,
    read: Callable[[], Sequence[RolloutGroup]],
    version: int,
) -> dict[str, float]:
    """Train the batch that `read` returns; return the seconds of all of it and of its parts.

    `host` is the time outside the first forward pass and the end of the last optimizer step:
    reading the batch, advantages, packing, statistics. `between` is the time inside that belongs to
    none of the three parts: cutting microbatches, and losses.
    """
    engine.restart()
    begin, cpu = time.perf_counter(), time.process_time()
    updater.update(read(), version)
    total = time.perf_counter() - begin
    assert engine.first is not None
    computing = engine.last - engine.first
    return {
        "seconds": total,
        "cpu_seconds": time.process_time() - cpu,
        **engine.seconds,
        "between": computing - sum(engine.seconds.values()),
        "host": total - computing,
    }


def timed_rounds(
    updater: Updater,
    engine: ClockedEngine,
    read: Callable[[], Sequence[RolloutGroup]],
    peak: Peak,
    rounds: int,
) -> list[dict[str, float]]:
    """Return `timed_update` of each batch but a first one, which touches fresh memory.

    `peak` and `peak_after` are the best matrix product before and after it, in operations/s.
    """
    timed, before = [], 0.0
    for version in range(rounds + 1):
        seconds = timed_update(updater, engine, read, version)
        after = peak.measure()
        timed.append({**seconds, "peak": before, "peak_after": after})
        before = after
    return timed[1:]


def figures_of(rounds: Sequence[Mapping[str, float]], flops: float, tokens: int) -> dict[str, Any]:
    """Return medians over the rounds of one size.

    Args:
        rounds: Figures of `timed_rounds`.
        flops: Of a batch.
        tokens: Of a batch, prompts included.
    """
    peaks = [(one["peak"] + one["peak_after"]) / 2 for one in rounds]
    return {
        "tokens": tokens,
        "flops": flops,
        "tokens_per_second": median(tokens / one["seconds"] for one in rounds),
        "peak": median(peaks),
        "utilisation": median(
            flops / one["seconds"] / peak for one, peak in zip(rounds, peaks, strict=True)
        ),
        "cpu": median(one["cpu_seconds"] / one["seconds"] for one in rounds),
        "shares": {part: median(one[part] / one["seconds"] for one in rounds) for part in SHARES},
        "raw": rounds,
    }

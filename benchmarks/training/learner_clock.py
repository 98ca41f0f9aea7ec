"""When a learner computes and when it does something else: an engine that watches the clock."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.training.flops import synchronize
from learner.engine.protocol import Forward, TrainEngine
from learner.update import Updater
from queues.records import RolloutGroup

PARTS = ("forward", "backward", "step")


class ClockedEngine:
    """A `TrainEngine` that notes how long each call takes, and when the first and last were.

    Waits for the device after every call, so that seconds belong to the call that made the work.
    """

    def __init__(self, engine: TrainEngine, device: torch.device) -> None:
        self._engine, self.device = engine, device
        self.rank, self.ranks = engine.rank, engine.ranks
        self.restart()

    def restart(self) -> None:
        """Forgets everything."""
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.first: float | None = None
        self.last = 0.0

    @property
    def steps_taken(self) -> int:
        """See `Trainable`."""
        return self._engine.steps_taken

    @property
    def gathers(self) -> bool:
        """See `TrainEngine`."""
        return self._engine.gathers

    def _timed(self, part: str, *arguments: Any) -> Any:
        begin = time.perf_counter()
        if self.first is None:
            self.first = begin
        result = getattr(self._engine, part)(*arguments)
        synchronize(self.device)
        self.last = time.perf_counter()
        self.seconds[part] += self.last - begin
        return result

    def forward(
        self, token_ids: Tensor, position_ids: Tensor, wanted: Tensor | None = None
    ) -> Forward:
        """See `TrainEngine`."""
        said: Forward = self._timed("forward", token_ids, position_ids, wanted)
        return said

    def backward(self, loss: Tensor) -> None:
        """See `Trainable`."""
        self._timed("backward", loss)

    def step(self) -> float:
        """See `Trainable`."""
        norm: float = self._timed("step")
        return norm

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """See `TrainEngine`."""
        return self._engine.sum_over_ranks(values)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `TrainEngine`."""
        return self._engine.weights()

    def save(self, folder: Path) -> None:
        """See `Trainable`."""
        self._engine.save(folder)

    def load(self, folder: Path) -> None:
        """See `Trainable`."""
        self._engine.load(folder)

    def close(self) -> None:
        """See `Trainable`."""
        self._engine.close()


def timed_update(
    updater: Updater,
    engine: ClockedEngine,
    read: Callable[[], Sequence[RolloutGroup]],
    version: int,
) -> dict[str, float]:
    """Trains the batch that `read` gives; seconds of all of it and of its parts.

    `host` is what is not between the first forward pass and the end of the last optimizer step:
    reading the batch, advantages, packing, statistics. `between` is what lies there and is none of
    the three parts: cutting rows, and losses.
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

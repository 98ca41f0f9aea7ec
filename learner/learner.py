"""The learner's loop.

    take(v) ──▶ update: one optimizer step ──▶ publish(v + 1) ──▶ ack(v, statistics) ──▶ checkpoint?
      │ waits for the broker:                    │ returns when the       │ frees B places for
      │ B groups are ready                       │ weights are copied     │ new leases

It waits only in `take`; actors unblock it by putting groups. Actors wait for the `ack` (places) and
for the publication (a version new enough to sample with). Training and copying run in a thread, so
that the event loop keeps answering. Leaves out supervision and how weights travel.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor

from queues.errors import QueueClosed
from queues.protocols import BatchQueue
from queues.records import RolloutGroup
from queues.schema import decode


class Trainer(Protocol):
    """What `update.Updater` does, with its weights."""

    def update(self, groups: Sequence[RolloutGroup], version: int) -> dict[str, Any]:
        """One batch; its statistics."""
        ...

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """The policy."""
        ...


class Learner:
    """Trains version after version.

    Example:
        learner = Learner(updater, broker, publish, steps=60, save=save, checkpoint_every=50)
        last = asyncio.run(learner.run())
    """

    def __init__(
        self,
        trainer: Trainer,
        batches: BatchQueue,
        publish: Callable[[int, Iterable[tuple[str, Tensor]]], None],
        *,
        steps: int,
        save: Callable[[int], Awaitable[None]],
        checkpoint_every: int,
        start_version: int = 0,
        poll_seconds: float = 2.0,
    ) -> None:
        """Takes its collaborators.

        Args:
            trainer: Trains a batch and gives the weights.
            batches: The broker.
            publish: Copies the weights of a version and returns; sending goes on behind it.
            steps: The last version; the loop ends when it is reached.
            save: Saves and commits a checkpoint of the version that was just acknowledged.
            checkpoint_every: Batches between checkpoints.
            start_version: The version that the trainer's weights are.
            poll_seconds: Longest time that one `take` waits, and so until a stop is seen.
        """
        self._trainer = trainer
        self._batches = batches
        self._publish = publish
        self._steps = steps
        self._save = save
        self._checkpoint_every = checkpoint_every
        self._start_version = start_version
        self._poll_seconds = poll_seconds

    async def run(self, stop: asyncio.Event | None = None) -> int:
        """Trains until the last step, the end of the queue, or `stop`; the version reached."""
        stop = stop or asyncio.Event()
        version = saved = self._start_version
        await asyncio.to_thread(self._publish_weights, version)
        while version < self._steps:
            times = {"wait_started_at": time.time()}
            groups = await self._take(version, stop)
            if groups is None:
                break
            times["wait_finished_at"] = times["step_started_at"] = time.time()
            statistics = await asyncio.to_thread(self._trainer.update, groups, version)
            times["step_finished_at"] = time.time()
            await asyncio.to_thread(self._publish_weights, version + 1)
            times["published_at"] = time.time()
            await self._batches.ack(version, {**statistics, **times})
            version += 1
            if version % self._checkpoint_every == 0:
                await self._save(version)
                saved = version
        if version > saved:
            await self._save(version)
        return version

    async def _take(self, version: int, stop: asyncio.Event) -> list[RolloutGroup] | None:
        """The groups of a version; None when there will be none, or after `stop`."""
        while not stop.is_set():
            try:
                batch = await self._batches.take(version, timeout=self._poll_seconds)
            except QueueClosed:
                return None
            if batch is not None:
                return await asyncio.to_thread(_decode, batch.payloads)
        return None

    def _publish_weights(self, version: int) -> None:
        self._publish(version, self._trainer.weights())


def _decode(payloads: Sequence[bytes]) -> list[RolloutGroup]:
    return [decode(payload) for payload in payloads]

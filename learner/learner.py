"""The learner's loop.

    take(v) ──▶ update: optimizer steps ──▶ publish(v + 1) ──▶ ack(v, statistics) ──▶ checkpoint?
      │ waits for the broker:                 │ returns when the       │ frees B places for
      │ B groups are ready                    │ weights are copied     │ new leases

It waits only in `take`; actors unblock it by putting groups. Actors wait for the `ack` (places) and
for the publication (a version new enough to sample with). A version that was trained before, which
happens after going back to an older checkpoint, is the recorded batch again, and its `ack` does
nothing. Leaves out how ranks train together (`ray_lead`), supervision and how weights travel.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from queues.errors import QueueClosed
from queues.protocols import BatchQueue
from queues.records import Payload


class Trainer(Protocol):
    """All ranks of a learner, as its loop sees them."""

    async def update(self, payloads: Sequence[Payload], version: int) -> dict[str, Any]:
        """Trains the batch of a version; its statistics."""
        ...

    async def publish(self, version: int) -> str:
        """Copies the weights of a version and returns; sending goes on behind it.

        Returns:
            Their checksum (`weight_sync.checksum`).
        """
        ...

    async def save(self, version: int, *, cursor: str | None, totals: Mapping[str, int]) -> str:
        """Writes a checkpoint; its path, relative to the run's folder."""
        ...

    async def prune(self, version: int) -> None:
        """Removes checkpoints that are not kept; this version's was the last to be committed."""
        ...


class Learner:
    """Trains version after version.

    Example:
        learner = Learner(trainer, broker, steps=60, checkpoint_every=50)
        last = asyncio.run(learner.run())
    """

    def __init__(
        self,
        trainer: Trainer,
        batches: BatchQueue,
        *,
        steps: int,
        checkpoint_every: int,
        start_version: int = 0,
        totals: Mapping[str, int] | None = None,
        poll_seconds: float = 2.0,
        observe: Callable[[Mapping[str, Any]], None] = lambda _: None,
    ) -> None:
        """Takes its collaborators.

        Args:
            trainer: Trains, publishes and saves.
            batches: The broker.
            steps: The last version; the loop ends when it is reached.
            checkpoint_every: Batches between checkpoints.
            start_version: The version that the trainer's weights are.
            totals: `rollouts` and `tokens` trained until then.
            poll_seconds: Longest time that one `take` waits, and so until a stop is seen.
            observe: Gets the statistics of each batch once they are acknowledged.
        """
        self._trainer = trainer
        self._batches = batches
        self._steps = steps
        self._checkpoint_every = checkpoint_every
        self._start_version = start_version
        self._totals = {"rollouts": 0, "tokens": 0, **(totals or {})}
        self._poll_seconds = poll_seconds
        self._observe = observe
        self.state = "publishes the weights that it begins with"
        """What it does, in words."""

    async def run(self, stop: asyncio.Event | None = None) -> int:
        """Trains until the last step, the end of the queue, or `stop`; the version reached."""
        stop = stop or asyncio.Event()
        began = {"session_started_at": time.time()}
        version = saved = self._start_version
        await self._trainer.prune(version)  # else a later one that lacks its commit would count
        await self._trainer.publish(version)
        while version < self._steps:
            self.state = f"waits for batch {version}"
            times = {**began, "wait_started_at": time.time()}
            payloads = await self._take(version, stop)
            if payloads is None:
                break
            self.state = f"trains batch {version}"
            times["wait_finished_at"] = times["step_started_at"] = time.time()
            statistics = await self._trainer.update(payloads, version)
            times["step_finished_at"] = time.time()
            checksum = await self._trainer.publish(version + 1)
            times["published_at"] = time.time()
            self._count(statistics)
            told = {**statistics, **times, "weights_checksum": checksum, "totals": self._totals}
            await self._batches.ack(version, told)
            self._observe(told)
            version += 1
            if version % self._checkpoint_every == 0:
                await self._save(version)
                saved = version
        if version > saved:
            await self._save(version)
        return version

    async def _take(self, version: int, stop: asyncio.Event) -> Sequence[Payload] | None:
        """The groups of a version; None when there will be none, or after `stop`."""
        while not stop.is_set():
            try:
                batch = await self._batches.take(version, timeout=self._poll_seconds)
            except QueueClosed:
                return None
            if batch is not None:
                return batch.payloads
        return None

    def _count(self, statistics: Mapping[str, Any]) -> None:
        """Adds a batch to the totals; every row of statistics gets totals of its own."""
        self._totals = {
            "rollouts": self._totals["rollouts"] + statistics["rollouts_trained"],
            "tokens": self._totals["tokens"] + statistics["tokens_trained"],
        }

    async def _save(self, version: int) -> None:
        self.state = f"saves version {version}"
        cursor = await self._batches.cursor()
        path = await self._trainer.save(version, cursor=cursor, totals=self._totals)
        await self._batches.commit_checkpoint(version, path)
        await self._trainer.prune(version)

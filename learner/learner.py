"""The learner's loop.

    take(v) ──▶ update: optimizer steps ──▶ publish(v + 1) ──▶ ack(v, report) ──▶ checkpoint?
      │ waits for the broker:                 │ returns when the     │ frees          │ returns as
      │ B groups are ready                    │ weights are copied   │ capacity       │ it is copied

It waits only in `take`, in `ack` for the checksum of the version, whose way to the engines has
begun, and for the last checkpoint if the next is due before that is written. A
checkpoint is copied and written while later batches are trained, and committed once it is whole:
before, it does not exist. Actors unblock `take` by putting groups. They wait for the `ack`, which
frees capacity for B new leases, and for the publication (a version new enough to sample with). A
version that was trained before, which happens after going back to an older checkpoint, is the
recorded batch again, and its `ack` does nothing. How ranks train together is
`learner.ranks.ray_leader`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol

from headway import clock
from headway.errors import HeadwayError
from learner.diagnostics.batch_report import BatchReport, BatchTimes, TrainedBatch
from queues.errors import QueueClosed
from queues.protocols import BatchQueue
from queues.records import Payload


class Trainer(Protocol):
    """All ranks of a learner, as its loop sees them."""

    async def update(self, payloads: Sequence[Payload], version: int) -> BatchReport:
        """Train the batch of a version."""

    async def publish(self, version: int) -> Awaitable[str]:
        """Copy the weights of a version, to be sent in the background.

        What is returned waits for their checksum, and raises what it failed with.
        """

    async def save(
        self, version: int, *, cursor: str | None, totals: Mapping[str, int], weights_checksum: str
    ) -> Awaitable[str]:
        """Begin to copy the state that a checkpoint has; the next `update` changes no part before.

        What is returned writes it, and gives its path, relative to the run's folder.
        """

    async def prune(self, version: int) -> None:
        """Remove checkpoints that are not kept; this version's was the last to be committed."""


@dataclass
class Learner:
    """Trains version after version.

    Example:
        learner = Learner(trainer, broker, steps=60, checkpoint_every=50)
        last = asyncio.run(learner.run())
    """

    trainer: Trainer
    batches: BatchQueue
    _: KW_ONLY
    steps: int
    """The last version; the loop ends when it is reached."""
    checkpoint_every: int
    """Batches between checkpoints."""
    start_version: int = 0
    """The version that the trainer's weights are."""
    start_checksum: str | None = None
    """Checksum that `Trainer.publish` returned for that version before; None if not known."""
    totals: Mapping[str, int] = field(default_factory=dict)
    """`rollouts` and `tokens` trained so far."""
    session_started_at: float | None = None
    """Epoch seconds that the times of its batches have as the begin of the session; None: `run`."""
    poll_seconds: float = 2.0
    """Longest time that one `take` waits, and so until a stop is seen."""
    observe: Callable[[TrainedBatch], None] = lambda _: None
    """Called with each batch once it is acknowledged, unless it was trained before."""
    state: str = field(default="publishes the weights that it begins with", init=False)
    """The loop's present work, for people to read."""
    _saving: asyncio.Task[None] | None = field(default=None, init=False)
    """Writes and commits a checkpoint while further batches are trained."""

    async def run(self, stop: asyncio.Event | None = None) -> int:
        """Train to the last step, the end of the queue, or `stop`; return the version reached.

        Raises:
            HeadwayError: The weights to begin with are not those of `start_checksum`.
        """
        stop = stop or asyncio.Event()
        session_started_at = self.session_started_at or clock.now()
        version = saved = self.start_version
        await self.trainer.prune(version)  # else a later one that lacks its commit would count
        checksum = await (await self.trainer.publish(version))
        if self.start_checksum not in (None, checksum):
            raise HeadwayError(
                f"the weights of version {version} were loaded with checksum {checksum}, and have "
                f"{self.start_checksum} in the ledger: its checkpoint was saved or loaded wrongly; "
                "resume again, and if it recurs rename the folder of the checkpoint, so that the "
                "run goes on from the one before"
            )
        while version < self.steps:
            self.state = f"waits for batch {version}"
            wait_started_at = clock.now()
            payloads = await self._take(version, stop)
            if payloads is None:
                break
            self.state = f"trains batch {version}"
            wait_finished_at = step_started_at = clock.now()
            report = await self.trainer.update(payloads, version)
            step_finished_at = clock.now()
            published = await self.trainer.publish(version + 1)
            times = BatchTimes(
                session_started_at=session_started_at,
                wait_started_at=wait_started_at,
                wait_finished_at=wait_finished_at,
                step_started_at=step_started_at,
                step_finished_at=step_finished_at,
                published_at=clock.now(),
            )
            checksum = await published
            await self._acknowledge(version, report, times, checksum)
            version += 1
            if version % self.checkpoint_every == 0:
                await self._save(version, checksum)
                saved = version
        if version > saved:
            await self._save(version, checksum)
        self.state = f"saves version {version}"
        await self._saved()
        return version

    async def _acknowledge(
        self, version: int, report: BatchReport, times: BatchTimes, checksum: str
    ) -> None:
        self.totals = {
            "rollouts": self.totals.get("rollouts", 0) + report.rollouts_trained,
            "tokens": self.totals.get("tokens", 0) + report.tokens_trained,
        }
        batch = TrainedBatch(
            version=version,
            report=report,
            times=times,
            weights_checksum=checksum,
            totals=self.totals,
        )
        if await self.batches.ack(version, batch.to_dict()):
            self.observe(batch)

    async def _take(self, version: int, stop: asyncio.Event) -> Sequence[Payload] | None:
        """Return the groups of a version; None when there will be none, or after `stop`."""
        while not stop.is_set():
            if self._saving is not None and self._saving.done():
                await self._saved()
            try:
                batch = await self.batches.take(version, timeout=self.poll_seconds)
            except QueueClosed:
                return None
            if batch is not None:
                return batch.payloads
        return None

    async def _save(self, version: int, checksum: str) -> None:
        self.state = f"saves version {version}"
        await self._saved()
        cursor = await self.batches.cursor()
        written = await self.trainer.save(
            version, cursor=cursor, totals=self.totals, weights_checksum=checksum
        )
        self._saving = asyncio.create_task(self._commit(version, written))

    async def _commit(self, version: int, written: Awaitable[str]) -> None:
        await self.batches.commit_checkpoint(version, await written)
        await self.trainer.prune(version)

    async def _saved(self) -> None:
        """Wait until the checkpoint that is being written is committed, if there is one."""
        saving, self._saving = self._saving, None
        if saving is not None:
            await saving

"""Rank 0 as the leader: the other ranks take part in each of its operations."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray

from learner.diagnostics.batch_report import BatchReport
from learner.disk_wait import wait_for_space
from learner.engine import checkpoint
from learner.ranks.rank import Rank
from learner.ranks.ray_calls import call_rank
from queues.records import Payload
from queues.schema import to_arrays
from weight_sync.announcements import Announcements
from weight_sync.probe import LEARNER, ProbeBudget, ProbeReport, Scores
from weight_sync.publish.background_publisher import BackgroundPublisher

Call = Callable[..., Awaitable[Any]]


@dataclass
class RankZero:
    """All ranks of a learner, led by this one (a `learner.learner.Trainer`).

    The batch goes to the object store once. A follower that fails fails the operation at once,
    though this rank may still hang in it.
    """

    rank: Rank
    """This process's, 0."""
    followers: Sequence[Any]
    """Handles of ranks 1, 2, ..."""
    call: Call
    """Runs a function in the thread where `rank` may be used."""
    publisher: BackgroundPublisher
    broadcaster: Announcements
    """Gets the scores of versions that are probed."""
    budget: ProbeBudget
    _skipped: int = field(default=0, init=False)
    """Versions that the publisher skipped, as far as they are reported."""

    async def update(self, payloads: Sequence[Payload], version: int) -> BatchReport:
        shared = ray.put(to_arrays(payloads)) if self.followers else None
        calls = [follower.update.remote(shared, version) for follower in self.followers]
        report: BatchReport = await self._together(
            self.call(self.rank.update, payloads, version), calls
        )
        skipped, self._skipped = self.publisher.skipped - self._skipped, self.publisher.skipped
        return replace(report, versions_skipped=skipped)

    async def publish(self, version: int) -> Awaitable[str]:
        gathering = self.followers if self.rank.engine.gathers else []
        probe = self.budget.allows()
        calls = [follower.gather.remote(probe=probe) for follower in gathering]
        adapter = self.rank.published_adapter

        def publish() -> tuple[Scores, Future[str]]:
            scores: Scores = ()
            if probe:
                with self.budget.spend():
                    scores = self.rank.probe()
            return scores, self.publisher.publish(version, self.rank.weights(), adapter)

        scores, checksum = await self._together(self.call(publish), calls)
        return self._published(version, scores, checksum)

    async def save(
        self, version: int, *, cursor: str | None, totals: Mapping[str, int], weights_checksum: str
    ) -> Awaitable[str]:
        calls = [follower.capture.remote() for follower in self.followers]
        await self._together(self.call(self.rank.capture), calls)
        state = self.rank.state_at(version)
        return self._write(
            replace(state, cursor=cursor, totals=dict(totals), weights_checksum=weights_checksum)
        )

    async def _write(self, state: checkpoint.State) -> str:
        """Write the checkpoint that was captured, while training goes on.

        Waits first for the disk space that the last one took; later each rank does (`disk_wait`).
        """
        root = Path(self.rank.spec.checkpoints)
        temporary = str(await asyncio.to_thread(checkpoint.prepare, root, state.version))
        await asyncio.to_thread(lambda: wait_for_space(root, checkpoint.newest_size(root)))
        calls = [follower.write.remote(temporary) for follower in self.followers]
        await self._together(asyncio.to_thread(self.rank.write, temporary), calls)
        folder = await asyncio.to_thread(checkpoint.finish, root, state)
        return f"checkpoints/{folder.name}"

    async def prune(self, version: int) -> None:
        config = self.rank.config
        await asyncio.to_thread(
            checkpoint.prune,
            Path(self.rank.spec.checkpoints),
            newest=version,
            keep=config.keep_checkpoints,
            keep_seconds=config.keep_checkpoint_hours * 3600,
        )

    async def _published(self, version: int, scores: Scores, checksum: Future[str]) -> str:
        """Report the scores of a version, if it was probed, and return its checksum."""
        sequences = self.rank.probe_sequences
        report = ProbeReport(source=LEARNER, version=version, sequences=sequences, scores=scores)
        reporting = [self.broadcaster.probed(report)] if scores else []
        return (await asyncio.gather(asyncio.wrap_future(checksum), *reporting))[0]

    async def _together(self, own: Awaitable[Any], calls: Sequence[Any]) -> Any:
        """Return this rank's result when all are done; raise the first failure at once."""
        followers = (call_rank(rank, call) for rank, call in enumerate(calls, start=1))
        return (await asyncio.gather(own, *followers))[0]

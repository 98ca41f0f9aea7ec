"""Follows a run: gathers what its processes report, writes it down, and notices when nothing moves.

Leaves out what the figures mean (`summary`) and how they look (`progress`, `report`).
"""

import asyncio
import time
from dataclasses import asdict
from typing import Any

from deploy.errors import RunFailed
from deploy.progress import Screen
from deploy.run_directory import RunDirectory
from deploy.summary import Record, summarise
from queues.ray_broker import BrokerClient
from queues.status import BrokerStatus
from weight_sync.ray_broadcaster import BroadcasterClient

POLL_SECONDS = 0.5
RECENT = 10
"""Batches that the shown tokens per second are taken over."""


class Recorder:
    """Keeps the `Record` of a run up to date."""

    def __init__(
        self,
        record: Record,
        directory: RunDirectory,
        screen: Screen,
        *,
        broker: BrokerClient,
        broadcaster: BroadcasterClient,
        actors: list[Any],
        stall_seconds: float,
        checkpoint_every: int,
    ) -> None:
        self._record, self._directory, self._screen = record, directory, screen
        self._broker, self._broadcaster, self._actors = broker, broadcaster, actors
        self._stall_seconds, self._checkpoint_every = stall_seconds, checkpoint_every
        self._moved_at = time.monotonic()
        self._moving: object = None

    async def follow(self) -> None:
        """Gathers until the last batch is trained, with a summary at every checkpoint.

        Raises:
            RunFailed: Neither a batch nor an evaluation ended for `stall_seconds`.
        """
        while self._record.version < self._record.steps:
            await asyncio.sleep(POLL_SECONDS)
            checkpoints = self._record.version // self._checkpoint_every
            status = await self.gather()
            if self._record.version // self._checkpoint_every > checkpoints:
                await self.conclude(status="running")
            self._check_movement(status)

    async def gather(self) -> BrokerStatus:
        """Takes everything that was reported since the last call."""
        record = self._record
        status = await self._broker.status(after=record.version - 1)
        batches = [{"version": b.version, **b.statistics} for b in status.batches]
        swaps = [asdict(r) for r in await self._broadcaster.reports(len(record.swaps))]
        record.batches.extend(batches)
        record.swaps.extend(swaps)
        self._directory.append("metrics.jsonl", batches)
        self._directory.append("swaps.jsonl", swaps)
        if batches:
            self._screen.batch(batches[-1], tokens_per_second=self._tokens_per_second())
        return status

    async def conclude(self, *, status: str) -> dict[str, Any]:
        """Gathers once more, with actors and accounts, and writes `summary.json`."""
        await self.gather()
        self._record.actors = await asyncio.gather(*[a.statistics.remote() for a in self._actors])
        self._record.accounting = (await self._broker.accounting()).to_dict()
        summary = summarise(self._record, status=status, now=time.time())
        self._directory.write_summary(summary)
        return summary

    def _check_movement(self, status: BrokerStatus) -> None:
        moving = (status.version, status.depth["ready"], tuple(status.evaluations))
        if moving != self._moving:
            self._moving, self._moved_at = moving, time.monotonic()
        elif time.monotonic() - self._moved_at > self._stall_seconds:
            raise RunFailed(
                f"nothing moved for deploy.stall_seconds = {self._stall_seconds:g}: version "
                f"{status.version}, groups {dict(status.depth)}, engines {dict(status.engines)}, "
                f"the learner waits for {list(status.waits_for)}"
            )

    def _tokens_per_second(self) -> float | None:
        recent = self._record.batches[-RECENT:]
        if len(recent) < 2:
            return None
        seconds = recent[-1]["step_finished_at"] - recent[0]["step_finished_at"]
        return float(sum(row["tokens_trained"] for row in recent[1:]) / seconds)

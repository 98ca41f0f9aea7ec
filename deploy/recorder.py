"""Follows a run: gathers what its processes report, writes it down, and ends one that goes wrong.

Goes wrong: nothing moves for too long, too many groups fail for good, or a token older than the
bound was trained. Leaves out what the figures mean (`summary`) and how they look (`progress`).
"""

import asyncio
import time
from dataclasses import asdict
from typing import Any

from deploy.config import RunConfig
from deploy.errors import RunFailed
from deploy.progress import Screen
from deploy.run_directory import RunDirectory
from deploy.summary import Record, Row, summarise
from deploy.supervisor import Supervisor
from queues.ray_broker import BrokerClient
from queues.status import BrokerStatus
from weight_sync.ray_broadcaster import BroadcasterClient

POLL_SECONDS = 0.5
SUMMARY_SECONDS = 20.0
"""Between two summaries: what a killed run forgets of its figures, batches and swaps excepted."""
RECENT = 10
"""Batches that the shown tokens per second are taken over."""


class Recorder:
    """Keeps the `Record` of a run up to date."""

    def __init__(
        self,
        config: RunConfig,
        record: Record,
        directory: RunDirectory,
        screen: Screen,
        *,
        broker: BrokerClient,
        broadcaster: BroadcasterClient,
        actors: list[Supervisor],
    ) -> None:
        self._config, self._record = config, record
        self._directory, self._screen = directory, screen
        self._broker, self._broadcaster, self._actors = broker, broadcaster, actors
        self._swaps = 0
        """Reports taken from the broadcaster, which knows nothing of earlier sittings."""
        self._summarised_at = time.monotonic()
        self._moved_at = time.monotonic()
        self._moving: object = None
        self._failed_before: int | None = None
        """Groups that had failed for good when this sitting began."""

    async def follow(self) -> None:
        """Gathers until it is cancelled, with a summary every SUMMARY_SECONDS.

        Raises:
            RunFailed: The run goes wrong; says how.
        """
        while True:
            await asyncio.sleep(POLL_SECONDS)
            status = await self._gather()
            if time.monotonic() - self._summarised_at > SUMMARY_SECONDS:
                await self._summarise("running")
            if status.version < status.steps:
                self._check_failures(status)
            self._check_movement(status)

    async def conclude(self, status: str) -> None:
        """Gathers for the last time; to be called when `follow` has ended."""
        await self._gather()
        await self._summarise(status)

    async def _gather(self) -> BrokerStatus:
        """Takes everything that was reported since the last call."""
        record = self._record
        status = await self._broker.status(after=record.version - 1)
        batches = [{"version": b.version, **b.statistics} for b in status.batches]
        swaps = [asdict(r) for r in await self._broadcaster.reports(self._swaps)]
        self._swaps += len(swaps)
        record.batches.extend(batches)
        record.swaps.extend(swaps)
        self._directory.append("metrics.jsonl", batches)
        self._directory.append("swaps.jsonl", swaps)
        self._check_lags(batches)
        if batches:
            self._screen.batch(batches[-1], tokens_per_second=self._tokens_per_second())
        return status

    async def _summarise(self, status: str) -> None:
        """Asks the actors and the accounts, and writes `summary.json`."""
        self._summarised_at = time.monotonic()
        self._record.actors = await asyncio.gather(*(a.statistics() for a in self._actors))
        self._record.accounting = (await self._broker.accounting()).to_dict()
        self._directory.write_summary(summarise(self._record, status=status, now=time.time()))

    def _check_lags(self, batches: list[dict[str, Any]]) -> None:
        if self._config.queues.on_overdue == "train":
            return  # the one policy under which overdue groups exceed the bound; they are counted
        for row in batches:
            if (row["max_lag"] or 0) > self._record.max_staleness:
                raise RunFailed(
                    f"batch {row['version']} trained a token of lag {row['max_lag']}, above "
                    f"queues.max_staleness = {self._record.max_staleness}"
                )

    def _check_failures(self, status: BrokerStatus) -> None:
        if self._failed_before is None:
            self._failed_before = status.depth["failed"]
        failed = status.depth["failed"] - self._failed_before
        allowed = self._config.deploy.max_failed_groups
        if failed > allowed:
            raise RunFailed(
                f"{failed} groups failed for good, more than deploy.max_failed_groups = {allowed}; "
                f"the last failure: {status.last_error}"
            )

    def _check_movement(self, status: BrokerStatus) -> None:
        moving = (status.version, status.accepted, self._swaps)
        if moving != self._moving:
            self._moving, self._moved_at = moving, time.monotonic()
        elif time.monotonic() - self._moved_at > self._config.deploy.stall_seconds:
            raise RunFailed(self._explain_stall(status))

    def _explain_stall(self, status: BrokerStatus) -> str:
        failed_swaps: list[Row] = [row for row in self._record.swaps if row["error"]]
        parts = [
            f"nothing moved for deploy.stall_seconds = {self._config.deploy.stall_seconds:g}",
            f"version {status.version}, groups {dict(status.depth)}, engines serve "
            f"{dict(status.engines)}",
            f"unfinished evaluations: {', '.join(status.evaluations) or 'none'}",
            f"the learner waits for {', '.join(status.waits_for) or 'nobody in particular'}",
            f"last failure: {status.last_error or 'none'}",
            f"last failed weight update: {failed_swaps[-1]['error'] if failed_swaps else 'none'}",
        ]
        return "; ".join(parts)

    def _tokens_per_second(self) -> float | None:
        recent = self._record.batches[-RECENT:]
        recent = [row for row in recent if row["step_finished_at"] > self._record.started_at]
        if len(recent) < 2:
            return None
        seconds = recent[-1]["step_finished_at"] - recent[0]["step_finished_at"]
        return float(sum(row["tokens_trained"] for row in recent[1:]) / seconds)

"""Follows a run: gathers what its processes report, writes it down, and ends one that goes wrong.

Goes wrong: nothing moves for too long, too many groups fail for good, or a token older than the
bound was trained. Leaves out what the figures mean (`summary`) and how they look (`progress`).
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from deploy.config.run_config import RunConfig
from deploy.driver.actor_supervisor import Supervisor
from deploy.errors import RunFailed
from deploy.observability.trackers import Trackers
from deploy.report.summary import summarise
from deploy.runtime.console import Screen
from deploy.runtime.daemon_thread import run_in_daemon_thread
from deploy.storage.jsonl import JsonlWriter
from deploy.storage.run_directory import RunDirectory
from deploy.storage.run_record import Record, Row
from learner.ranks.ray_group import LearnerGroup
from queues.broker.status import BrokerStatus
from queues.ray_broker import BrokerClient
from queues.runtime.disk_space import full_disk_message, has_space, is_full
from weight_sync.ray_broadcaster import BroadcasterClient

POLL_SECONDS = 0.5
SUMMARY_SECONDS = 20.0
"""Between two summaries: what a killed run forgets of its figures, batches and swaps excepted."""
ACCOUNTS_SECONDS = 5.0
"""Deadline of the broker's accounts, which wait for its disk; the last ones count meanwhile."""
ASK_SECONDS = 10.0
"""Nothing has moved for so long: the reason may be a learner that waits for room."""
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
        learner: LearnerGroup,
        actors: list[Supervisor],
        rows: JsonlWriter,
        trackers: Trackers | None = None,
    ) -> None:
        self._config, self._record = config, record
        self._directory, self._screen = directory, screen
        self._broker, self._broadcaster = broker, broadcaster
        self._learner, self._actors, self._rows = learner, actors, rows
        self._trackers = trackers
        self._swaps = 0
        """Reports taken from the broadcaster, which knows nothing of earlier sessions."""
        self._updates = 0
        """Those of them that say an engine serves a version."""
        self._summarised_at = time.monotonic()
        self._moved_at = time.monotonic()
        self._moving: object = None
        self._paused: str | None = None
        self._asked_at = 0.0
        """When the learner was last asked whether it waits."""
        self._failed_before: int | None = None
        """Groups that had failed for good when this session began."""

    async def follow(self) -> None:
        """Gathers until it is cancelled, with a summary every SUMMARY_SECONDS.

        Raises:
            RunFailed: The run goes wrong; says how.
        """
        while True:
            await asyncio.sleep(POLL_SECONDS)
            status = await self._gather()
            if await self._pauses(status):
                continue
            if time.monotonic() - self._summarised_at > SUMMARY_SECONDS:
                try:
                    await self._summarise("running")
                except OSError as error:
                    if not is_full(error, self._directory.path):
                        raise
            if status.version < status.steps:
                self._check_failures(status)
            await self._check_movement(status)

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
        self._updates += sum(swap["error"] is None for swap in swaps)
        record.batches.extend(batches)
        record.swaps.extend(swaps)
        if self._trackers is not None:
            for row in batches:
                self._trackers.batch(row)
        if batches:
            self._screen.batch(batches[-1], tokens_per_second=self._tokens_per_second())
        await run_in_daemon_thread(lambda: self._write(batches, swaps))
        self._check_lags(batches)
        return status

    def _write(self, batches: Sequence[Row], swaps: Sequence[Row]) -> None:
        self._rows.write("metrics.jsonl", batches)
        self._rows.write("swaps.jsonl", swaps)

    async def _pauses(self, status: BrokerStatus) -> bool:
        """Whether the run waits for room on a disk; says so at the beginning and the end.

        The broker tells by itself. The learner is asked where nothing has moved for a while.
        """
        now = time.monotonic()
        reason = status.paused
        quiet = min(now - self._moved_at, now - self._asked_at) > ASK_SECONDS
        if reason is None and (quiet or self._paused):
            self._asked_at = now
            reason = await self._learner.paused()
        folder = self._directory.path
        if reason is None and (self._rows.kept or self._paused) and not has_space(folder):
            reason = full_disk_message(folder)
        if reason is not None:
            self._moved_at = time.monotonic()
        if (reason is None) != (self._paused is None):
            self._screen.say(f"paused: {reason}" if reason else "there is room again: goes on")
        self._paused = reason
        return reason is not None

    async def _summarise(self, status: str) -> None:
        """Asks the actors and the accounts, and writes `summary.json`."""
        self._summarised_at = time.monotonic()
        self._record.actors = await asyncio.gather(*(a.statistics() for a in self._actors))
        with suppress(TimeoutError):
            async with asyncio.timeout(ACCOUNTS_SECONDS):
                self._record.accounting = (await self._broker.accounting()).to_dict()
        summary = summarise(self._record, status=status, now=time.time())
        await run_in_daemon_thread(lambda: self._directory.write_summary(summary))

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

    async def _check_movement(self, status: BrokerStatus) -> None:
        moving = (status.version, status.accepted, self._updates)
        if moving != self._moving:
            self._moving, self._moved_at = moving, time.monotonic()
        elif time.monotonic() - self._moved_at > self._config.deploy.stall_seconds:
            if await self._learner.paused():
                return  # found out too late to be shown yet
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

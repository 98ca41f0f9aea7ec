"""Gathers what the processes of a run report, writes it down, and ends a run that goes wrong."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from statistics import fmean
from typing import Any, TypeVar

import psutil

from actors.engines.model_folder import load_tokenizer
from deploy.driver.engine_drift import DriftWatch
from deploy.driver.failure_budget import FailureBudget
from deploy.driver.processes import Processes
from deploy.driver.run_context import RunContext
from deploy.errors import RunFailed
from deploy.observability.samples import FILE as SAMPLES
from deploy.observability.samples import Sample, best_and_worst, decode_samples
from deploy.observability.trackers import Trackers
from deploy.report.staleness_window import advice, limit_of, window_moves
from deploy.report.summary import sessions, summarise
from deploy.report.tables import describe_failed
from deploy.runtime.peak_memory import peaks
from deploy.storage.run_record import HACKING, PROBES, Record, Score
from headway import clock
from headway.daemon_thread import run_in_daemon_thread
from headway.full_disk import is_full
from headway.roles import Role
from learner.diagnostics.batch_report import TrainedBatch
from learner.diagnostics.reward_hacking import Hacking, find_hacking
from queues.broker.status import BrokerStatus
from queues.readers.accounting import failed_prompts
from queues.readers.open_run import open_ledger
from queues.readers.recorded_batches import read_batch
from queues.state.groups import State

T = TypeVar("T")

log = logging.getLogger(__name__)

RECENT_BATCHES = 10
"""Number of batches that the displayed tokens per second are taken over."""


class Recorder:
    """Keeps the `Record` of a run up to date, from what its processes report at intervals.

    A killed run loses the figures since the last summary, but no batch or swap. A summary has the
    broker's last accounting if a new one takes longer than `accounting_seconds`.
    """

    def __init__(
        self,
        context: RunContext,
        processes: Processes,
        trackers: Trackers,
        *,
        poll_seconds: float = 0.5,
        summary_seconds: float = 20.0,
        accounting_seconds: float = 5.0,
    ) -> None:
        self._context, self._processes, self._trackers = context, processes, trackers
        self.drift = DriftWatch(context, processes.fleet.actors)
        found = [row["version"] + 1 for row in context.directory.rows(HACKING)]
        self._unsuspected = max((v for v in found if v <= context.record.version), default=0)
        """First version after the newest finding that the reward is hacked."""
        self._stops: Hacking | None = None
        """Finding that ends the run."""
        self._limits: set[str] = set()
        """Limits of the throughput that this session has named."""
        self._poll_seconds, self._summary_seconds = poll_seconds, summary_seconds
        self._accounting_seconds = accounting_seconds
        self._swaps = 0
        """Number of swap reports taken from the broadcaster since its last restart."""
        self._broadcaster = context.record.restarts[Role.BROADCASTER]
        self._summarised_at = time.monotonic()
        self._tokenizer: Any = None
        self._sampling_failed = False
        self._last_write: asyncio.Future[Any] | None = None
        """The write begun last, which goes on when `follow` is cancelled."""
        limits = context.config.deploy
        self._failures = FailureBudget(limits.max_failed_groups, limits.failure_window)

    async def follow(self, save: Callable[[], Awaitable[None]]) -> None:
        """Gather until cancelled, and write a summary at intervals.

        Raises RunFailed if too many groups failed, a token older than the bound was trained, or,
        once `save` has returned, if the reward is hacked and the recipe ends a run then.
        """
        while True:
            await asyncio.sleep(self._poll_seconds)
            status = await self._gather()
            if self._stops is not None:
                await save()
                raise RunFailed(
                    f"{self._stops}; ended by actors.gold.on_hacking, go on with: headway resume "
                    f"{self._context.directory.path}"
                )
            if time.monotonic() - self._summarised_at > self._summary_seconds:
                try:
                    await self._summarise("running")
                except OSError as error:
                    if not is_full(error, self._context.directory.path):
                        raise
            if status.version < status.steps:
                await self._check_failures(status)

    async def check_complete(self) -> None:
        """Raise RunFailed if the run trained nothing, or less than asked, as prompts failed."""
        status = await self._processes.broker.status(after=self._context.record.version)
        if status.version >= status.steps or (status.version and not status.depth[State.FAILED]):
            return
        raise RunFailed(
            f"{status.version} of {status.steps} steps are trained, and no prompt is left to train "
            f"on; {await self._failed() or 'every group was dropped'}"
        )

    async def conclude(self, status: str) -> None:
        """Gather for the last time and write the summary; to be called when `follow` has ended."""
        await self._gather()
        await self._summarise(status)

    async def _gather(self) -> BrokerStatus:
        """Take everything that was reported since the last call."""
        record, jsonl = self._context.record, self._context.jsonl
        status = await self._processes.broker.status(after=record.version - 1)
        batches = [
            TrainedBatch.from_dict({"version": acknowledged.version, **acknowledged.statistics})
            for acknowledged in status.batches
        ]
        rows = [batch.to_dict() for batch in batches]
        if self._broadcaster != (number := record.restarts[Role.BROADCASTER]):
            self._broadcaster, self._swaps = number, 0
        swaps = await self._processes.broadcaster.reports(self._swaps)
        self._swaps += len(swaps)
        reports = await self._processes.broadcaster.probes()
        record.batches.extend(batches)
        record.swaps.extend(swaps)
        for row in rows:
            self._trackers.batch(row)
        if batches:
            newest = batches[-1]
            self._context.console.advance(newest.version + 1, describe(newest, record))
            self._say_window(len(batches))

        hackings = self._hackings(len(batches))
        probes, wrong = self.drift.probed(reports)
        found = [*wrong, *self.drift.observe(batches)]
        drifts = [{**asdict(drift), "at": clock.now()} for drift in found]

        def write() -> list[Sample]:
            jsonl.write("metrics.jsonl", rows)
            jsonl.write("drift.jsonl", drifts)
            jsonl.write(HACKING, hackings)
            jsonl.write("swaps.jsonl", [asdict(report) for report in swaps])
            jsonl.write(PROBES, [asdict(probe) for probe in probes])
            samples = [sample for batch in batches for sample in self._samples(batch.version)]
            jsonl.write(SAMPLES, [asdict(sample) for sample in samples])
            return samples

        self._trackers.samples((await self._write(write))[-2:])
        self._check_lags(batches)
        return status

    def _say_window(self, count: int) -> None:
        """Say how so many new batches moved the window of staleness, and each limit found once."""
        record, say = self._context.record, self._context.console.say
        for text in window_moves(record.batches[-count - 1 :]):
            say(text)
        limit = limit_of(record.batches)
        shares = (row["idle_fraction"] for row in record.actors)
        idle = [share for share in shares if share is not None]
        if limit not in self._limits and (text := advice(limit, fmean(idle) if idle else None)):
            self._limits.add(limit)
            say(text)

    def _hackings(self, count: int) -> list[dict[str, Any]]:
        """Find where the reward is hacked in the newest batches, of which so many are new."""
        gold, record = self._context.config.actors.gold, self._context.record
        rows: list[dict[str, Any]] = []
        if gold is None:
            return rows
        for end in range(record.version - count + 1, record.version + 1):
            finding = find_hacking(record.batches[self._unsuspected : end])
            if finding is not None:
                self._unsuspected, record.hackings = end, record.hackings + 1
                self._stops = finding if gold.on_hacking == "stop" else None
                self._context.console.say(str(finding))
                rows.append({**asdict(finding), "text": str(finding), "at": clock.now()})
        return rows

    def _samples(self, version: int) -> list[Sample]:
        """Return two rollouts of a batch; none if they cannot be read, which ends no run."""
        try:
            payloads = read_batch(self._context.directory.path, version, groups=1)
            if payloads and self._tokenizer is None:
                self._tokenizer = load_tokenizer(self._context.inputs.model_path)
            return best_and_worst([*decode_samples(payloads, version, self._tokenizer)])
        except Exception as error:  # noqa: BLE001  (tokenizers are other projects' code)
            if not self._sampling_failed:
                log.warning("no rollouts of batch %d are kept as text: %r", version, error)
            self._sampling_failed = True
            return []

    async def _summarise(self, status: str) -> None:
        """Ask actors and broker, and write `summary.json`."""
        self._summarised_at = time.monotonic()
        record, directory = self._context.record, self._context.directory
        statistics = [actor.statistics() for actor in self._processes.fleet.actors]
        record.actors = await asyncio.gather(*statistics)
        record.memory |= await run_in_daemon_thread(lambda: peaks(psutil.Process()))
        with suppress(TimeoutError):
            async with asyncio.timeout(self._accounting_seconds):
                record.accounting = (await self._processes.broker.accounting()).to_dict()
        summary = summarise(record, status=status, now=clock.now())
        await self._write(lambda: directory.write_summary(summary))

    async def _write(self, work: Callable[[], T]) -> T:
        """Call `work` in a thread when the write before has ended, cancelled or not: in order."""
        if self._last_write is not None:
            await asyncio.wait([self._last_write])
        self._last_write = asyncio.ensure_future(run_in_daemon_thread(work))
        return await asyncio.shield(self._last_write)

    def _check_lags(self, batches: Sequence[TrainedBatch]) -> None:
        if self._context.config.queues.on_overdue == "train":
            return  # the one policy under which overdue groups exceed the bound; they are counted
        bound = self._context.record.max_staleness
        for batch in batches:
            lag = batch.report.max_lag or 0
            if lag > bound:
                raise RunFailed(
                    f"batch {batch.version} trained a token of lag {lag}, above "
                    f"queues.max_staleness = {bound}"
                )

    async def _check_failures(self, status: BrokerStatus) -> None:
        if (failed := self._failures.exceeded(status.depth)) is not None:
            limits = self._context.config.deploy
            raise RunFailed(
                f"{failed} of the last {limits.failure_window} groups failed for good, more than "
                f"deploy.max_failed_groups = {limits.max_failed_groups}; "
                f"{await self._failed() or status.last_error}"
            )

    async def _failed(self) -> str:
        """Name what failed for good, and what to type."""
        path = self._context.directory.path

        def read() -> str:
            with open_ledger(path, verify=False) as database:
                return describe_failed(failed_prompts(database), path)

        return await run_in_daemon_thread(read)


def describe(batch: TrainedBatch, record: Record) -> str:
    """Describe a trained batch in one line, with the newest held-out scores."""
    report, scores = batch.report, show_scores(record.newest_scores())
    reward = "no reward" if report.reward_mean is None else f"reward {report.reward_mean:.3f}"
    parts = [reward, *([f"held-out {scores}"] if scores else [])]
    if report.max_lag is None:
        parts.append("every token masked")
    else:
        parts.append(f"lag {report.lag_mean:.2f} (max {report.max_lag})")
        parts.append(f"length {report.response_length_mean:.0f}")
    if (speed := _tokens_per_second(record)) is not None:
        parts.append(f"{speed:,.0f} tokens/s")
    return " · ".join(parts)


def show_scores(scores: Mapping[str, Score]) -> str:
    """Format held-out scores by kind as text.

    Example:
        >>> show_scores({"greedy": Score(0.5, 20, 0), "pass@4": Score(0.75, 3, 2)})
        'greedy 0.500, pass@4 0.750 (3 of 5, 2 failed)'
    """
    return ", ".join(f"{kind} {score}" for kind, score in scores.items())


def _tokens_per_second(record: Record) -> float | None:
    """Return the speed over the last batches of this session; None if there are fewer than two."""
    *_, recent = [[], *sessions(record.batches[-RECENT_BATCHES:])]
    if len(recent) < 2:
        return None
    seconds = recent[-1].times.step_finished_at - recent[0].times.step_finished_at
    return sum(batch.report.tokens_trained for batch in recent[1:]) / seconds

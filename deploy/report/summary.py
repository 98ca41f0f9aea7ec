"""The figures of `summary.json`, computed from the record of a run; pure functions."""

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from statistics import fmean
from typing import Any

from deploy.storage.run_record import REWARD_MODEL, Record
from learner.diagnostics.batch_report import ORIGINS, BatchReport, TrainedBatch
from weight_sync.announcements import WeightUpdateReport

WARM_UP = 5
"""Batches at a run's beginning that figures of its speed leave out: engines warm up and the
pipeline fills."""
READY_SECONDS = 0.1
"""A batch that the learner waited for less than this was ready: requesting it takes that long."""


def summarise(record: Record, *, status: str, now: float) -> dict[str, Any]:
    """Return the content of `summary.json`.

    Args:
        record: The record of the run so far.
        status: running, done, failed or interrupted.
        now: Epoch seconds.
    """
    batches = record.batches
    reports = [batch.report for batch in batches]
    return {
        "name": record.name,
        "status": status,
        "version": record.version,
        "steps": record.steps,
        "optimizer_steps": sum(report.optimizer_steps for report in reports),
        "seconds": record.seconds(now),
        "seconds_to_first_step": _seconds_to_first_step(record),
        "tokens_generated": record.earlier.tokens_generated
        + sum(row["tokens_generated"] for row in record.actors),
        "tokens_trained": sum(report.tokens_trained for report in reports),
        "rollouts_trained": sum(report.rollouts_trained for report in reports),
        "samples_per_second": samples_per_second(batches),
        "heldout": record.heldout,
        "heldout_sampled": record.heldout_sampled,
        "max_staleness": record.max_staleness,
        "max_lag_trained": max(
            (report.max_lag for report in reports if report.max_lag is not None), default=None
        ),
        "lag_histogram": _lags(reports),
        "ess_mean": _mean(report.off_policy.ess for report in reports),
        "mismatch": {origin: _mismatch(reports, origin) for origin in ORIGINS},
        "multi_version_rollouts": sum(report.multi_version_rollouts for report in reports),
        "idle_fraction": {
            "learner": learner_idle(batches),
            "actors": _mean(row["idle_fraction"] for row in record.actors),
        },
        "weight_sync": {
            **weight_sync(record.swaps),
            "skipped": sum(report.versions_skipped or 0 for report in reports),
        },
        "overlap": overlap(batches, record.swaps),
        "selection": selection(record),
        "restarts": {
            "actors": record.restarts.total() - record.restarts[REWARD_MODEL],
            "reward_models": record.restarts[REWARD_MODEL],
        },
        "accounting": record.accounting,
    }


def selection(record: Record) -> dict[str, int]:
    """Count what was left out of training or trained late, as of the newest batch."""
    newest = record.batches[-1].flow if record.batches else {}
    return {
        "groups_filtered": record.accounting.get("dropped", {}).get("filtered", 0),
        "groups_let_through": newest.get("groups_let_through", 0),
        "prompts_retired": newest.get("prompts_retired", 0),
        "groups_overdue": newest.get("groups_overdue", 0),
    }


def samples_per_second(batches: Sequence[TrainedBatch]) -> float | None:
    """Return the rollouts trained per second, between the first and the last step of sessions."""
    sessions = _sessions(batches)
    seconds = sum(_span(session) for session in sessions)
    rollouts = sum(batch.report.rollouts_trained for session in sessions for batch in session[1:])
    return rollouts / seconds if seconds else None


def learner_idle(batches: Sequence[TrainedBatch]) -> float | None:
    """Return the share of the time of `samples_per_second` in which the learner waited."""
    sessions = _sessions(batches)
    seconds = sum(_span(session) for session in sessions)
    waits = sum(batch.times.wait_seconds for session in sessions for batch in session[1:])
    return waits / seconds if seconds else None


def _sessions(batches: Sequence[TrainedBatch]) -> list[list[TrainedBatch]]:
    """Split the batches by session, in order."""
    by_session = groupby(batches, key=lambda batch: batch.times.session_started_at)
    return [list(session) for _, session in by_session]


def _span(session: Sequence[TrainedBatch]) -> float:
    """Return the seconds from the end of the first step to the end of the last step."""
    return session[-1].times.step_finished_at - session[0].times.step_finished_at


def _seconds_to_first_step(record: Record) -> float | None:
    if record.earlier.seconds_to_first_step is not None or not record.batches:
        return record.earlier.seconds_to_first_step
    return record.seconds(record.batches[0].times.step_finished_at)


def successful_updates(swaps: Sequence[WeightUpdateReport]) -> list[WeightUpdateReport]:
    """Return the updates that succeeded; those that seed a new engine are left out."""
    return [update for update in swaps if update.error is None and not update.seeding]


def weight_sync(swaps: Sequence[WeightUpdateReport]) -> dict[str, Any]:
    """Return means over `successful_updates`."""
    done = successful_updates(swaps)
    return {
        "updates": len(done),
        "failed": sum(update.error is not None for update in swaps),
        "pause_seconds_mean": _mean(update.stalled_seconds for update in done),
        "publish_to_serving_seconds_mean": _mean(update.serving_seconds for update in done),
        "bytes_mean": _mean(update.bytes for update in done),
    }


def overlap(batches: Sequence[TrainedBatch], swaps: Sequence[WeightUpdateReport]) -> dict[str, int]:
    """Count the updates that reached an engine after the learner had begun its next step.

    `queue_ready` counts the updates whose next batch was ready when the version was published; in
    the others the learner waited for rollouts, not for the update.
    """
    next_step = {batch.version: batch.times.step_started_at for batch in batches}
    ready = {batch.version: batch.times.wait_seconds for batch in batches}
    done = [
        (update.version, update.swap_finished_at)
        for update in swaps
        if update.swap_finished_at is not None and update.version in next_step
    ]
    waited_little = [
        (version, served_at)
        for version, served_at in done
        if version and ready[version] < READY_SECONDS
    ]
    return {
        "updates": len(done),
        "learner_ahead": sum(served_at > next_step[version] for version, served_at in done),
        "queue_ready": len(waited_little),
        "queue_ready_and_learner_ahead": sum(
            served_at > next_step[version] for version, served_at in waited_little
        ),
    }


def _lags(reports: Sequence[BatchReport]) -> dict[str, int]:
    counts: Counter[int] = Counter()
    for report in reports:
        counts.update(report.lag_histogram)
    return {str(lag): counts[lag] for lag in sorted(counts)}


def _mismatch(reports: Sequence[BatchReport], origin: str) -> dict[str, Any]:
    """Return the mean |log current − log behaviour| over all tokens of one origin."""
    figures = [report.off_policy.origins[origin] for report in reports]
    tokens = sum(part.tokens for part in figures)
    total = sum(part.tokens * (part.mismatch or 0.0) for part in figures)
    return {"tokens": tokens, "mean_abs_logprob_difference": total / tokens if tokens else None}


def _mean(values: Any) -> float | None:
    present = [value for value in values if value is not None]
    return fmean(present) if present else None

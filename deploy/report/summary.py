"""The figures of summary.json, computed from the record of a run; pure functions."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from statistics import fmean
from typing import Any

from actors.rollout.agent_statistics import merge_agents
from deploy.storage.run_record import Record
from headway.roles import Role
from learner.diagnostics.batch_report import ORIGINS, BatchReport, TrainedBatch
from weight_sync.announcements import WeightUpdateReport

WARM_UP = 5
"""Batches at a run's beginning that figures of its speed leave out."""
READY_SECONDS = 0.1
"""A batch that the learner waited for less than this was ready: requesting it takes that long."""


def summarise(record: Record, *, status: str, now: float) -> dict[str, Any]:
    """Return the content of `summary.json`; `now` is in epoch seconds."""
    batches = record.batches
    reports = [batch.report for batch in batches]
    first_step = record.earlier.seconds_to_first_step
    if first_step is None and batches:
        first_step = record.seconds(batches[0].times.step_finished_at)
    learner_idle, samples_per_second = _learner_rates(batches)
    lags: Counter[int] = Counter()
    for report in reports:
        lags.update(report.lag_histogram)
    return {
        "name": record.name,
        "status": status,
        "version": record.version,
        "steps": record.steps,
        "optimizer_steps": sum(report.optimizer_steps for report in reports),
        "seconds": record.seconds(now),
        "seconds_to_first_step": first_step,
        "tokens_generated": record.earlier.tokens_generated
        + sum(row["tokens_generated"] for row in record.actors),
        "tokens_trained": sum(report.tokens_trained for report in reports),
        "rollouts_trained": sum(report.rollouts_trained for report in reports),
        "samples_per_second": samples_per_second,
        "heldout": record.heldout,
        "heldout_sampled": record.heldout_sampled,
        "max_staleness": record.max_staleness,
        "max_lag_trained": max(
            (report.max_lag for report in reports if report.max_lag is not None), default=None
        ),
        "lag_histogram": {str(lag): lags[lag] for lag in sorted(lags)},
        "ess_mean": _mean(report.ess for report in reports),
        "mismatch": {origin: _mismatch(reports, origin) for origin in ORIGINS},
        "multi_version_rollouts": sum(report.multi_version_rollouts for report in reports),
        "idle_fraction": {
            "learner": learner_idle,
            "actors": _mean(row["idle_fraction"] for row in record.actors),
        },
        "weight_sync": {
            **weight_sync(record.swaps),
            "skipped": sum(report.versions_skipped or 0 for report in reports),
        },
        "overlap": overlap(batches, record.swaps),
        "selection": _selection(record),
        **_agents(record.actors),
        "restarts": _by_role(record.restarts),
        "lost_seconds": _by_role(record.away),
        "accounting": record.accounting,
    }


def _agents(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the counters of agents' sessions in this session of the run; empty without agents."""
    counted = [row["agents"] for row in rows if "agents" in row and row["agents"]["agent"]]
    return {"agents": merge_agents(counted)} if counted else {}


def _by_role(figures: Mapping[str, float]) -> dict[str, float]:
    """Sum figures of processes by their role."""
    others = (Role.REWARD_MODEL, Role.LEARNER, Role.BROKER, Role.BROADCASTER, Role.DRIVER)
    keys = {Role.REWARD_MODEL: "reward_models"}
    actors = sum(figure for process, figure in figures.items() if process not in others)
    named = {keys.get(role, role.value): figures.get(role, 0) for role in others}
    return {"actors": actors, **named}


def _selection(record: Record) -> dict[str, int]:
    """Count the groups left out of training or trained late, as of the newest batch."""
    newest = record.batches[-1].flow if record.batches else {}
    return {
        "groups_filtered": record.accounting.get("dropped", {}).get("filtered", 0),
        "groups_let_through": newest.get("groups_let_through", 0),
        "prompts_retired": newest.get("prompts_retired", 0),
        "groups_overdue": newest.get("groups_overdue", 0),
    }


def _learner_rates(batches: Sequence[TrainedBatch]) -> tuple[float | None, float | None]:
    """Return the share of time in which the learner waited, and rollouts trained per second.

    The time of a session lasts from the end of its first step to the end of its last step.
    """
    seconds = waits = 0.0
    rollouts = 0
    for first, *others in sessions(batches):
        if others:
            seconds += others[-1].times.step_finished_at - first.times.step_finished_at
        waits += sum(batch.times.wait_seconds for batch in others)
        rollouts += sum(batch.report.rollouts_trained for batch in others)
    return (waits / seconds, rollouts / seconds) if seconds else (None, None)


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

    `queue_ready` counts the updates whose next batch was ready when the version was published.
    """
    times = {batch.version: batch.times for batch in batches}
    ahead: list[bool] = []
    ahead_where_ready: list[bool] = []
    for update in swaps:
        if update.swap_finished_at is None or update.version not in times:
            continue
        following = times[update.version]
        ahead.append(update.swap_finished_at > following.step_started_at)
        if update.version and following.wait_seconds < READY_SECONDS:
            ahead_where_ready.append(ahead[-1])
    return {
        "updates": len(ahead),
        "learner_ahead": sum(ahead),
        "queue_ready": len(ahead_where_ready),
        "queue_ready_and_learner_ahead": sum(ahead_where_ready),
    }


def _mismatch(reports: Sequence[BatchReport], origin: str) -> dict[str, Any]:
    """Return the mean |log current − log behaviour| over all tokens of one origin."""
    figures = [report.origins[origin] for report in reports]
    tokens = sum(part.tokens for part in figures)
    total = sum(part.tokens * (part.mismatch or 0.0) for part in figures)
    return {"tokens": tokens, "mean_abs_logprob_difference": total / tokens if tokens else None}


def _mean(values: Any) -> float | None:
    present = [value for value in values if value is not None]
    return fmean(present) if present else None


def version_seconds(batches: Sequence[TrainedBatch]) -> dict[int, float]:
    """Return when each version was made, in seconds since the learner first waited for a batch.

    The time from the last step of a session to the first wait of the next does not count. A batch
    whose record is missing counts with the next one.
    """
    seconds: dict[int, float] = {}
    passed, before = 0.0, None
    for batch in batches:
        times = batch.times
        seconds.setdefault(batch.version, passed)
        begun = times.wait_started_at
        if before is not None and before.session_started_at == times.session_started_at:
            begun = before.step_finished_at
        passed += times.step_finished_at - begun
        seconds[batch.version + 1], before = passed, times
    return seconds


def sessions(batches: Sequence[TrainedBatch]) -> list[list[TrainedBatch]]:
    """Return the batches of each session, in order."""
    groups = groupby(batches, key=lambda batch: batch.times.session_started_at)
    return [list(session) for _, session in groups]


def resumptions(batches: Sequence[TrainedBatch]) -> list[int]:
    """Return the versions from which a later session trained on."""
    return [session[0].version for session in sessions(batches)[1:]]


KEYS = tuple(summarise(Record("", 0, 0, started_at=0.0), status="", now=0.0))
"""Keys of `summary.json`."""

"""The figures of `summary.json`, computed from the record of a run; pure functions."""

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from statistics import fmean
from typing import Any

from deploy.storage.run_record import REWARD_MODEL, Record, Row

WARM_UP = 5
"""Batches at a run's beginning that figures of its speed leave out: engines warm up and the
pipeline fills."""
ORIGINS = ("fresh", "crossed", "stale")
"""Rollouts by the versions that sampled them; `learner.diagnostics.off_policy` defines them."""
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
    return {
        "name": record.name,
        "status": status,
        "version": record.version,
        "steps": record.steps,
        "optimizer_steps": sum(row["optimizer_steps"] for row in batches),
        "seconds": record.seconds(now),
        "seconds_to_first_step": _seconds_to_first_step(record),
        "tokens_generated": record.earlier.tokens_generated
        + sum(row["tokens_generated"] for row in record.actors),
        "tokens_trained": sum(row["tokens_trained"] for row in batches),
        "rollouts_trained": sum(row["rollouts_trained"] for row in batches),
        "samples_per_second": samples_per_second(batches),
        "heldout": record.heldout,
        "heldout_sampled": record.heldout_sampled,
        "max_staleness": record.max_staleness,
        "max_lag_trained": max(
            (row["max_lag"] for row in batches if row["max_lag"] is not None), default=None
        ),
        "lag_histogram": _lags(batches),
        "ess_mean": _mean(row["ess"] for row in batches),
        "mismatch": {origin: _mismatch(batches, origin) for origin in ORIGINS},
        "multi_version_rollouts": sum(row["multi_version_rollouts"] for row in batches),
        "idle_fraction": {
            "learner": learner_idle(batches),
            "actors": _mean(row["idle_fraction"] for row in record.actors),
        },
        "weight_sync": {
            **weight_sync(record.swaps),
            "skipped": sum(row.get("versions_skipped", 0) for row in batches),
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
    newest = record.batches[-1] if record.batches else {}
    return {
        "groups_filtered": record.accounting.get("dropped", {}).get("filtered", 0),
        "groups_let_through": newest.get("groups_let_through", 0),
        "prompts_retired": newest.get("prompts_retired", 0),
        "groups_overdue": newest.get("groups_overdue", 0),
    }


def samples_per_second(batches: Sequence[Row]) -> float | None:
    """Return the rollouts trained per second, between the first and the last step of sessions."""
    sessions = _sessions(batches)
    seconds = sum(_span(rows) for rows in sessions)
    rollouts = sum(row["rollouts_trained"] for rows in sessions for row in rows[1:])
    return rollouts / seconds if seconds else None


def learner_idle(batches: Sequence[Row]) -> float | None:
    """Return the share of the time of `samples_per_second` in which the learner waited."""
    sessions = _sessions(batches)
    seconds = sum(_span(rows) for rows in sessions)
    waits = sum(
        row["wait_finished_at"] - row["wait_started_at"] for rows in sessions for row in rows[1:]
    )
    return waits / seconds if seconds else None


def _sessions(batches: Sequence[Row]) -> list[list[Row]]:
    """Split the batches by session, in order."""
    return [list(rows) for _, rows in groupby(batches, key=itemgetter("session_started_at"))]


def _span(rows: Sequence[Row]) -> float:
    """Return the seconds from the end of the first step to the end of the last step."""
    return float(rows[-1]["step_finished_at"] - rows[0]["step_finished_at"])


def _seconds_to_first_step(record: Record) -> float | None:
    if record.earlier.seconds_to_first_step is not None or not record.batches:
        return record.earlier.seconds_to_first_step
    return record.seconds(record.batches[0]["step_finished_at"])


def weight_sync(swaps: Sequence[Row]) -> dict[str, Any]:
    """Return means over successful updates; those that seed a new engine are left out."""
    done = [row for row in swaps if row["error"] is None and not row["seeding"]]
    return {
        "updates": len(done),
        "failed": sum(row["error"] is not None for row in swaps),
        "pause_seconds_mean": _mean(pause_seconds(row) for row in done),
        "publish_to_serving_seconds_mean": _mean(
            row["swap_finished_at"] - row["published_at"] for row in done
        ),
        "bytes_mean": _mean(row["bytes"] for row in done),
    }


def pause_seconds(update: Row) -> float:
    """Return the seconds for which a weight update stopped its engine."""
    return float(update["pause_seconds"] + update["load_seconds"] + update["resume_seconds"])


def overlap(batches: Sequence[Row], swaps: Sequence[Row]) -> dict[str, int]:
    """Count the updates that reached an engine after the learner had begun its next step.

    `queue_ready` counts the updates whose next batch was ready when the version was published; in
    the others the learner waited for rollouts, not for the update.
    """
    next_step = {row["version"]: row["step_started_at"] for row in batches}
    ready = {row["version"]: row["wait_finished_at"] - row["wait_started_at"] for row in batches}
    done = [row for row in swaps if row["error"] is None and row["version"] in next_step]
    waited_little = [
        row for row in done if row["version"] and ready[row["version"]] < READY_SECONDS
    ]
    return {
        "updates": len(done),
        "learner_ahead": sum(row["swap_finished_at"] > next_step[row["version"]] for row in done),
        "queue_ready": len(waited_little),
        "queue_ready_and_learner_ahead": sum(
            row["swap_finished_at"] > next_step[row["version"]] for row in waited_little
        ),
    }


def _lags(batches: Sequence[Row]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for row in batches:
        counts.update(row["lag_histogram"])
    return {lag: counts[lag] for lag in sorted(counts, key=int)}


def _mismatch(batches: Sequence[Row], origin: str) -> dict[str, Any]:
    """Return the mean |log current − log behaviour| over all tokens of one origin."""
    tokens = sum(row[f"tokens_{origin}"] for row in batches)
    total = sum(row[f"tokens_{origin}"] * (row[f"mismatch_{origin}"] or 0.0) for row in batches)
    return {"tokens": tokens, "mean_abs_logprob_difference": total / tokens if tokens else None}


def _mean(values: Any) -> float | None:
    present = [value for value in values if value is not None]
    return fmean(present) if present else None

"""Figures of whole runs, from the statistics of their batches.

Everything is measured over one window: from the end of step WARM_UP to the end of the last step.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from benchmarks.harness.record import Record
from deploy.planner.calibration import LEAST_BATCHES
from deploy.report.report import read_batches
from deploy.report.summary import WARM_UP, successful_updates
from deploy.report.timeline import Curve, clip, idle_share, overlaps, running_rollouts
from deploy.storage.run_directory import RunDirectory
from headway.errors import InputError
from queues.readers.group_history import last_lease, read_history
from weight_sync.announcements import WeightUpdateReport

Row = Mapping[str, Any]
"""Statistics of a batch."""
UNCUT = ("not_finite", "ratio_bounded", "weight_bounded", "sequence_bounded")
"""Fractions of tokens that are no work of the loss or the correction."""


def read_run(directory: RunDirectory, *, leased_only: bool = False) -> Record:
    """Return the figures of a finished run, or of its batches before the last lease alone.

    Raises:
        InputError: The run has too few batches, or cannot be read.
    """
    batches = [batch.to_dict() for batch in read_batches(directory)]
    rows = leased_rows(directory, batches) if leased_only else batches
    groups = read_history(directory.path, rows[0]["version"], len(batches)).groups
    engines, (begin, end) = running_rollouts(groups), window(rows)
    swaps = directory.rows("swaps.jsonl", lambda row: WeightUpdateReport(**row))
    pauses = [
        (swap.swap_started_at, swap.swap_finished_at)
        for swap in successful_updates(swaps)
        if swap.swap_started_at is not None
    ]
    rollouts = fmean(len(group.rollouts) for group in groups)
    waiting = [(g.accepted_at, g.taken_at) for g in groups if g.accepted_at is not None]
    return {
        "first_version": rows[WARM_UP]["version"],
        "batches": len(rows) - WARM_UP,
        **training(
            rows, actors_idle=fmean(idle_share(curve, begin, end) for curve in engines.values())
        ),
        "windows": [w for row in rows[WARM_UP:] if (w := row.get("staleness_window")) is not None],
        "lag_max": max(row["max_lag"] for row in batches if row["tokens_trained"]),
        "pauses": mean_count(overlaps(pauses), begin, end) / len(engines),
        "groups_in_engines": sum(mean_count(curve, begin, end) for curve in engines.values())
        / rollouts,
        "groups_ready": mean_count(overlaps(waiting), begin, end),
    }


def leased_rows(directory: RunDirectory, batches: Sequence[Row]) -> Sequence[Row]:
    """Return the batches of a run before its last lease; raises `InputError` for too few."""
    leased = last_lease(directory.path) or 0.0
    rows = [row for row in batches if row["step_finished_at"] < leased]
    if len(rows) < LEAST_BATCHES:
        raise InputError(
            f"{directory.path} has trained {len(batches)} batches, {len(rows)} of them before "
            f"its last group was leased; at least {LEAST_BATCHES} of these are needed"
        )
    return rows


def mean_count(curve: Curve, begin: float, end: float) -> float:
    """Return the mean of a count over the time between two moments."""
    points = pairwise(clip(curve, begin, end))
    return sum(count * (after - time) for (time, count), (after, _) in points) / (end - begin)


def window(rows: Sequence[Row]) -> tuple[float, float]:
    """Return the epoch seconds of the end of the last warm-up step and of the last step."""
    return rows[WARM_UP - 1]["step_finished_at"], rows[-1]["step_finished_at"]


def speed(rows: Sequence[Row]) -> dict[str, float]:
    """Return samples and tokens per second, and the mean tokens of a rollout, in the window."""
    begin, end = window(rows)
    rollouts, tokens = (
        sum(row[key] for row in rows[WARM_UP:]) for key in ("rollouts_trained", "tokens_trained")
    )
    return {
        "samples_per_second": rollouts / (end - begin),
        "tokens_per_second": tokens / (end - begin),
        "tokens_per_rollout": tokens / rollouts,
    }


def training(rows: Sequence[Row], *, actors_idle: float) -> Record:
    """Return the figures of a training run from its batches, in order.

    `actors_idle` is the share of the window in which an engine had no rollout, mean over engines.
    """
    begin, end = window(rows)
    measured = rows[WARM_UP:]
    waits = sum(row["wait_finished_at"] - row["wait_started_at"] for row in measured)
    rewards = [row["reward_mean"] for row in measured if row["reward_mean"] is not None]
    raw = ("step_finished_at", "tokens_trained", "rollouts_trained")
    return {
        **speed(rows),
        "learner_idle": waits / (end - begin),
        "actors_idle": actors_idle,
        **off_policyness([row for row in measured if row["tokens_trained"]]),
        "reward_mean": fmean(rewards) if rewards else None,
        "raw": {key: [row[key] for row in rows] for key in raw},
    }


def off_policyness(rows: Sequence[Row]) -> Record:
    """Return how far the trained tokens of batches were from the policy that trained them.

    Returns:
        `lag_mean` and `lag_max` in versions, over tokens; `lags`, the share of tokens of each lag;
        `ess`, mean over batches of the effective sample size as a fraction; `kl`, nats a token, of
        the tokens that have one, or None; `cut`, the largest of the shares of tokens that a loss or
        correction clipped, capped, masked or rejected, mean over batches, or None.
    """
    lags: Counter[int] = Counter()
    for row in rows:
        lags.update({int(lag): count for lag, count in row["lag_histogram"].items()})
    known = [(row["kl"], row["tokens_trained"]) for row in rows if row.get("kl") is not None]
    tokens = sum(count for _, count in known)
    cuts: defaultdict[str, list[float]] = defaultdict(list)
    for name, share in (item for row in rows for item in row.get("fractions", {}).items()):
        if share is not None and name not in UNCUT:
            cuts[name].append(share)
    return {
        "lag_mean": sum(lag * count for lag, count in lags.items()) / lags.total(),
        "lag_max": max(lags),
        "lags": {str(lag): lags[lag] / lags.total() for lag in sorted(lags)},
        "ess": fmean(row["ess"] for row in rows),
        "kl": sum(kl * count for kl, count in known) / tokens if known else None,
        "cut": max(map(fmean, cuts.values()), default=None),
    }

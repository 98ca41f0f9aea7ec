"""Figures of whole runs, from the statistics of their batches.

Everything is measured over one window: from the end of step WARM_UP to the end of the last step.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from benchmarks.harness.record import Record
from deploy.planner.calibration import read_rates
from deploy.report.report import read_batches
from deploy.report.summary import WARM_UP
from deploy.report.timeline import idle_share, running_rollouts
from deploy.storage.run_directory import RunDirectory
from queues.readers.group_history import read_history

Row = Mapping[str, Any]
"""Statistics of a batch."""


def read_run(directory: RunDirectory, *, leased_only: bool = False) -> Record:
    """Return the figures of a finished run, or of its batches before the last lease alone.

    Raises:
        InputError: The run has too few batches, or cannot be read.
    """
    batches = [batch.to_dict() for batch in read_batches(directory)]
    rows = batches
    if leased_only:
        rates = read_rates(directory)
        rows = [row for row in batches if rates.first <= row["version"] <= rates.last]
    history = read_history(directory.path, rows[0]["version"], len(batches))
    curves = running_rollouts(history.groups).values()
    idle = fmean(idle_share(curve, *window(rows)) for curve in curves)
    return {
        "first_version": rows[WARM_UP]["version"],
        "batches": len(rows) - WARM_UP,
        **training(rows, actors_idle=idle),
        "lag_max": max(row["max_lag"] for row in batches if row["tokens_trained"]),
    }


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
    steps = [row["step_finished_at"] - row["step_started_at"] for row in measured]
    rewards = [row["reward_mean"] for row in measured if row["reward_mean"] is not None]
    raw = ("step_finished_at", "tokens_trained", "rollouts_trained")
    return {
        **speed(rows),
        "learner_idle": waits / (end - begin),
        "learner_step_seconds": fmean(steps),
        "learner_other_seconds": (end - begin - waits - sum(steps)) / len(measured),
        "actors_idle": actors_idle,
        **off_policyness([row for row in measured if row["tokens_trained"]]),
        "reward_mean": fmean(rewards) if rewards else None,
        "raw": {key: [row[key] for row in rows] for key in raw},
    }


def off_policyness(rows: Sequence[Row]) -> Record:
    """Return how far the trained tokens of batches were from the policy that trained them.

    Returns:
        `lag_mean` and `lag_max` in versions, over tokens; `ess`, mean over batches of the effective
        sample size as a fraction; `kl`, nats a token, of the tokens that have one, or None.
    """
    lags: Counter[int] = Counter()
    for row in rows:
        lags.update({int(lag): count for lag, count in row["lag_histogram"].items()})
    known = [(row["kl"], row["tokens_trained"]) for row in rows if row.get("kl") is not None]
    tokens = sum(count for _, count in known)
    return {
        "lag_mean": sum(lag * count for lag, count in lags.items()) / lags.total(),
        "lag_max": max(lags),
        "ess": fmean(row["ess"] for row in rows),
        "kl": sum(kl * count for kl, count in known) / tokens if known else None,
    }

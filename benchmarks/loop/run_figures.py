"""Figures of whole runs, from the statistics of their batches.

Everything is measured over one window: from the end of step WARM_UP to the end of the last step.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from benchmarks.harness.study import medians_over
from deploy.planner.simulator import quantile
from deploy.report.summary import WARM_UP
from deploy.report.timeline import idle_share, running_rollouts
from deploy.storage.run_directory import RunDirectory
from queues.readers.group_history import read_history

Row = Mapping[str, Any]
"""Statistics of a batch."""
Point = tuple[float, float]
"""Seconds of training, and the held-out score at that time."""


def window(rows: Sequence[Row]) -> tuple[float, float]:
    """Return the epoch seconds of the end of the last warm-up step and of the last step."""
    return rows[WARM_UP - 1]["step_finished_at"], rows[-1]["step_finished_at"]


def samples_per_second(rows: Sequence[Row]) -> float:
    """Return the rollouts trained per second in the window."""
    begin, end = window(rows)
    return float(sum(row["rollouts_trained"] for row in rows[WARM_UP:]) / (end - begin))


def tokens_per_rollout(rows: Sequence[Row]) -> float:
    """Return the mean sampled tokens of a rollout in the window."""
    measured = rows[WARM_UP:]
    rollouts = sum(row["rollouts_trained"] for row in measured)
    return float(sum(row["tokens_trained"] for row in measured) / rollouts)


def actors_idle(directory: RunDirectory, rows: Sequence[Row], steps: int) -> float:
    """Return the share of the window in which an engine had no rollout, mean over engines.

    Args:
        directory: Of the run.
        rows: Its batches, or the first of them, in order.
        steps: Number of all its batches.
    """
    history = read_history(directory.path, rows[0]["version"], steps)
    curves = running_rollouts(history.groups).values()
    return fmean(idle_share(curve, *window(rows)) for curve in curves)


def off_policyness(rows: Sequence[Row]) -> dict[str, Any]:
    """Return how far the trained tokens were from the policy that trained them.

    Args:
        rows: Statistics of the batches of one run, in order.

    Returns:
        `lag_mean`, `lag_p95`, `lag_max` in versions, over tokens; `ess`, mean over batches of the
        effective sample size as a fraction; `kl_fresh`, `kl_stale` and `kl_crossed`, nats a token
        of rollouts that the learner's own version sampled (numerics alone), that an older one did,
        and that several did, and `kl` of all; None where there were none; `clipped`, the largest
        of the shares of tokens that loss or correction clipped, capped or rejected.
    """
    measured = [row for row in rows[WARM_UP:] if row["tokens_trained"]]
    lags: Counter[int] = Counter()
    for row in measured:
        lags.update({int(lag): count for lag, count in row["lag_histogram"].items()})
    return {
        "lag_mean": sum(lag * count for lag, count in lags.items()) / lags.total(),
        "lag_p95": quantile(lags, 0.95),
        "lag_max": max(lags),
        "ess": fmean(row["ess"] for row in measured),
        **{
            f"kl_{origin}": weighed(measured, f"kl_{origin}", f"tokens_{origin}")
            for origin in ("fresh", "stale", "crossed")
        },
        "kl": weighed(measured, "kl", "tokens_trained"),
        "clipped": fmean(largest_share(row["fractions"]) for row in measured),
    }


def largest_share(fractions: Mapping[str, float]) -> float:
    """Return the largest share of tokens that one rule limited; the shares overlap."""
    return max((share for name, share in fractions.items() if name != "not_finite"), default=0.0)


def weighed(rows: Sequence[Row], figure: str, weight: str) -> float | None:
    """Return the mean of a figure over tokens; None where no row has it."""
    values = [(row[figure], row[weight]) for row in rows if row.get(figure) is not None]
    tokens = sum(count for _, count in values)
    return sum(value * count for value, count in values) / tokens if tokens else None


def curve(rows: Sequence[Row], scores: Mapping[int, float]) -> list[Point]:
    """Return held-out scores against seconds of training.

    Returns:
        (seconds from the first wait for a batch to the step that made the version, score).
    """
    began = rows[0]["wait_started_at"]
    ends = {row["version"] + 1: row["step_finished_at"] - began for row in rows}
    return [(ends.get(version, 0.0), scores[version]) for version in sorted(scores)]


def seconds_to(curve: Sequence[Point], target: float) -> float | None:
    """Return when a target is reached, interpolated between two points; None where it is not."""
    for (before, least), (seconds, score) in pairwise([*curve[:1], *curve]):
        if score >= target:
            rise = score - least
            return before + (seconds - before) * (target - least) / rise if rise else seconds
    return None


def learning(curve: Sequence[Point], target: float) -> dict[str, Any]:
    """Return the last score and its time, and the time of the target, of a curve."""
    return {
        "score": curve[-1][1],
        "seconds": curve[-1][0],
        "seconds_to_target": seconds_to(curve, target),
        "curve": curve,
    }


def training(rows: Sequence[Row], actors_idle: float) -> dict[str, Any]:
    """Return the figures of one training run.

    Args:
        rows: Its batches, in order.
        actors_idle: Figure of `actors_idle`.
    """
    begin, end = window(rows)
    measured = rows[WARM_UP:]
    trained = [row for row in measured if row["tokens_trained"]]
    tokens = sum(row["tokens_trained"] for row in trained)
    lags = sum(row["lag_mean"] * row["tokens_trained"] for row in trained)
    waits = sum(row["wait_finished_at"] - row["wait_started_at"] for row in measured)
    steps = [row["step_finished_at"] - row["step_started_at"] for row in measured]
    raw = ("step_finished_at", "tokens_trained", "rollouts_trained")
    return {
        "samples_per_second": samples_per_second(rows),
        "learner_idle": waits / (end - begin),
        "learner_step_seconds": fmean(steps),
        "learner_other_seconds": (end - begin - waits - sum(steps)) / len(measured),
        "actors_idle": actors_idle,
        "lag_mean": lags / tokens,
        "lag_max": max(row["max_lag"] for row in trained),
        "ess": fmean(row["ess"] for row in trained),
        "kl": weighed(trained, "kl", "tokens_trained"),
        "tokens_per_rollout": tokens_per_rollout(rows),
        "reward_mean": fmean(row["reward_mean"] for row in measured),
        "raw": {key: [row[key] for row in rows] for key in raw},
    }


def generation(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the figures of actors alone, with one policy."""
    samples, tokens = samples_per_second(rows), tokens_per_rollout(rows)
    return {
        "samples_per_second": samples,
        "tokens_per_second": samples * tokens,
        "tokens_per_rollout": tokens,
    }


def token_seconds(initial: Row, trained: Row) -> float | None:
    """Return the seconds that actors alone take for each further token of a rollout.

    Returns:
        None where the lengths are the same, or the longer rollouts were faster.
    """
    longer = trained["tokens_per_rollout"] - initial["tokens_per_rollout"]
    slower = 1 / trained["samples_per_second"] - 1 / initial["samples_per_second"]
    return slower / longer if abs(longer) > 1 and slower / longer > 0 else None


def actors_limit(initial: Row, trained: Row, tokens: float) -> dict[str, float]:
    """Return the samples/s of actors alone for rollouts of a mean length.

    A rollout takes a fixed time and a time per token, both from the two measurements. Where they
    are not known (`token_seconds`), tokens/s divided by `tokens` are used, the mean of both.

    Args:
        initial: `generation` with the initial policy.
        trained: `generation` with a trained policy.
        tokens: Mean tokens per rollout.
    """
    by_initial = initial["tokens_per_second"] / tokens
    by_trained = trained["tokens_per_second"] / tokens
    per_token, seconds = token_seconds(initial, trained), 0.0
    if per_token is not None:
        longer = tokens - initial["tokens_per_rollout"]
        seconds = 1 / initial["samples_per_second"] + per_token * longer
    return {
        "samples_per_second": 1 / seconds if seconds > 0 else fmean((by_initial, by_trained)),
        "by_tokens_of_initial_policy": by_initial,
        "by_tokens_of_trained_policy": by_trained,
    }


def compare_with_limits(
    runs: Mapping[str, dict[str, Any]], limits: Mapping[str, Any]
) -> dict[str, Any]:
    """Return one round: each run beside the smaller limit."""
    limit = min(limits["actors"]["samples_per_second"], limits["learner_samples_per_second"])
    return {
        "arms": {
            name: {**figures, "ratio_to_limit": figures["samples_per_second"] / limit}
            for name, figures in runs.items()
        },
        "limits": {**limits, "samples_per_second": limit},
    }


def medians(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the median over rounds of every figure; ratios are taken within a round."""
    limits = [
        {
            "actors": one_round["limits"]["actors"]["samples_per_second"],
            "learner": one_round["limits"]["learner_samples_per_second"],
            "samples_per_second": one_round["limits"]["samples_per_second"],
        }
        for one_round in rounds
    ]
    arms = [one_round["arms"] for one_round in rounds]
    return {"arms": medians_over(arms), "limits": medians_over(limits)}

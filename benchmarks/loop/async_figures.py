"""Figures of `headway bench async`, as pure functions of the statistics of batches.

Everything is measured over one window: from the end of step WARM_UP to the end of the last step.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from deploy.report.summary import WARM_UP

Row = Mapping[str, Any]
"""Statistics of a batch."""


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


def training(rows: Sequence[Row], actors_idle: float) -> dict[str, Any]:
    """Return the figures of one training run.

    Args:
        rows: Its batches, in order.
        actors_idle: Share of the window in which an engine had no rollout, mean over engines.
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

    def middle(pick: Callable[[Mapping[str, Any]], float]) -> float:
        return median(pick(one_round) for one_round in rounds)

    return {
        "arms": {
            name: {
                key: middle(lambda one_round, name=name, key=key: one_round["arms"][name][key])
                for key, value in figures.items()
                if not isinstance(value, dict)
            }
            for name, figures in rounds[0]["arms"].items()
        },
        "limits": {
            "actors": middle(lambda one_round: one_round["limits"]["actors"]["samples_per_second"]),
            "learner": middle(lambda one_round: one_round["limits"]["learner_samples_per_second"]),
            "samples_per_second": middle(
                lambda one_round: one_round["limits"]["samples_per_second"]
            ),
        },
    }

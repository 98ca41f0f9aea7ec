"""Figures of `headway bench async`, as pure functions of what arms and limits recorded.

Everything is measured over one window: from the end of step WARM_UP to the end of the last step.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from deploy.report.summary import WARM_UP

Row = Mapping[str, Any]


def samples_per_second(rows: Sequence[Row]) -> float:
    """Rollouts per second of rows with `step_finished_at` and `rollouts_trained`, one per batch."""
    begin, end = window(rows)
    return float(sum(row["rollouts_trained"] for row in rows[WARM_UP:]) / (end - begin))


def window(rows: Sequence[Row]) -> tuple[float, float]:
    """Epoch seconds of the end of the last warm-up step and of the last step."""
    return rows[WARM_UP - 1]["step_finished_at"], rows[-1]["step_finished_at"]


def tokens_per_rollout(rows: Sequence[Row]) -> float:
    """Mean sampled tokens of a rollout in the window."""
    measured = rows[WARM_UP:]
    rollouts = sum(row["rollouts_trained"] for row in measured)
    return float(sum(row["tokens_trained"] for row in measured) / rollouts)


def arm(rows: Sequence[Row], actors_idle: float) -> dict[str, Any]:
    """Figures of one training run.

    Args:
        rows: Statistics of its batches, in order.
        actors_idle: Share of the window in which an engine had no rollout, mean over engines.
    """
    begin, end = window(rows)
    measured = rows[WARM_UP:]
    trained = [row for row in measured if row["tokens_trained"]]
    tokens = sum(row["tokens_trained"] for row in trained)
    lags = sum(row["lag_mean"] * row["tokens_trained"] for row in trained)
    waits = sum(row["wait_finished_at"] - row["wait_started_at"] for row in measured)
    steps = [row["step_finished_at"] - row["step_started_at"] for row in measured]
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
        "raw": {
            "step_finished_at": [row["step_finished_at"] for row in rows],
            "tokens_trained": [row["tokens_trained"] for row in rows],
            "rollouts_trained": [row["rollouts_trained"] for row in rows],
        },
    }


def generation(rows: Sequence[Row]) -> dict[str, Any]:
    """Figures of actors alone, with one policy.

    Args:
        rows: Of each batch `step_finished_at` (it was consumed), `rollouts_trained`,
            `tokens_trained`.
    """
    samples, tokens = samples_per_second(rows), tokens_per_rollout(rows)
    return {
        "samples_per_second": samples,
        "tokens_per_second": samples * tokens,
        "tokens_per_rollout": tokens,
    }


def token_seconds(initial: Row, trained: Row) -> float | None:
    """Seconds that actors alone take for each token more of a rollout; None where that is not told.

    It is not by rollouts of the same length, or by longer ones that were faster.

    Args:
        initial: `generation` with the initial policy.
        trained: `generation` with a trained one.
    """
    longer = trained["tokens_per_rollout"] - initial["tokens_per_rollout"]
    slower = 1 / trained["samples_per_second"] - 1 / initial["samples_per_second"]
    return slower / longer if abs(longer) > 1 and slower / longer > 0 else None


def actors_limit(initial: Row, trained: Row, tokens: float) -> dict[str, float]:
    """Samples/s of actors alone for rollouts of another mean length than they were measured at.

    Args:
        initial: `generation` with the initial policy.
        trained: `generation` with a trained one.
        tokens: Mean tokens per rollout of the arm that the limit is for.

    Returns:
        `samples_per_second`: a rollout takes a fixed time and a time per token, both from the two
        measurements. Where they do not tell (`token_seconds`), and beside it for comparison, the
        tokens/s of each divided by `tokens`.
    """
    by_initial = initial["tokens_per_second"] / tokens
    by_trained = trained["tokens_per_second"] / tokens
    each, seconds = token_seconds(initial, trained), 0.0
    if each is not None:
        more = tokens - initial["tokens_per_rollout"]
        seconds = 1 / initial["samples_per_second"] + each * more
    return {
        "samples_per_second": 1 / seconds if seconds > 0 else fmean((by_initial, by_trained)),
        "by_tokens_of_initial_policy": by_initial,
        "by_tokens_of_trained_policy": by_trained,
    }


def conclude(arms: Mapping[str, dict[str, Any]], limits: Mapping[str, Any]) -> dict[str, Any]:
    """One round: each arm beside the limit.

    Args:
        arms: `arm` of each, by name.
        limits: `actors` as of `actors_limit` and `learner_samples_per_second`.
    """
    actors = limits["actors"]["samples_per_second"]
    limit = min(actors, limits["learner_samples_per_second"])
    return {
        "arms": {
            name: {**figures, "ratio_to_limit": figures["samples_per_second"] / limit}
            for name, figures in arms.items()
        },
        "limits": {**limits, "samples_per_second": limit},
    }


def medians(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The median over rounds of every figure of every arm and limit; ratios are of each round."""
    first = rounds[0]

    def middle(pick: Callable[[Mapping[str, Any]], float]) -> float:
        return median(pick(each) for each in rounds)

    return {
        "arms": {
            name: {
                key: middle(lambda each, name=name, key=key: each["arms"][name][key])
                for key, value in figures.items()
                if not isinstance(value, dict)
            }
            for name, figures in first["arms"].items()
        },
        "limits": {
            "actors": middle(lambda each: each["limits"]["actors"]["samples_per_second"]),
            "learner": middle(lambda each: each["limits"]["learner_samples_per_second"]),
            "samples_per_second": middle(lambda each: each["limits"]["samples_per_second"]),
        },
    }

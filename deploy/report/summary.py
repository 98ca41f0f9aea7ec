"""Figures of a run from what it recorded: `summary.json`, as pure functions."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from statistics import fmean
from typing import Any

from deploy.driver.evaluations import GREEDY
from queues.records import Evaluation

Row = Mapping[str, Any]

REWARD_MODEL = "reward-model"
"""What the process of the reward models is called in `restarts.jsonl`."""

WARM_UP = 5
"""Batches at a run's beginning that figures of its speed leave out: engines warm up and the
pipeline fills."""

READY_SECONDS = 0.1
"""A learner that waited less for its batch found it ready: this is the time of asking."""


@dataclass(frozen=True, slots=True)
class Earlier:
    """What a resumed run did before, as far as its batches and swaps do not tell."""

    seconds: float = 0.0
    tokens_generated: int = 0
    seconds_to_first_step: float | None = None


@dataclass(slots=True)
class Record:
    """What the driver has gathered of a run so far, in all of its sittings.

    A sitting is the time from a `headway run` or `headway resume` to its end.
    """

    name: str
    steps: int
    max_staleness: int
    started_at: float
    """Epoch seconds when the command began."""
    earlier: Earlier = field(default_factory=Earlier)
    batches: list[Row] = field(default_factory=list)
    """Statistics of each trained batch with its `version` (the one it was trained at)."""
    swaps: list[Row] = field(default_factory=list)
    """Swap reports."""
    heldout: list[Row] = field(default_factory=list)
    """Greedy evaluations: version, seconds, score, versions."""
    heldout_sampled: list[Row] = field(default_factory=list)
    """Evaluations at the training temperature."""
    actors: list[Row] = field(default_factory=list)
    """The newest statistics of each actor."""
    restarts: Counter[str] = field(default_factory=Counter)
    """How often each process was made again."""
    accounting: Row = field(default_factory=dict)

    @property
    def version(self) -> int:
        """Batches trained."""
        return len(self.batches)

    def seconds(self, now: float) -> float:
        """Seconds that the run has been going on by `now` (epoch seconds), pauses left out."""
        return self.earlier.seconds + now - self.started_at

    @property
    def scored(self) -> set[int]:
        """Versions whose held-out scores are in."""
        return {row["version"] for row in self.heldout}

    def add_scores(
        self,
        version: int,
        scores: Mapping[str, Evaluation],
        *,
        now: float,
        samples: Mapping[str, int] | None = None,
    ) -> None:
        """Adds the held-out scores of a version.

        Args:
            version: That was scored.
            scores: By kind.
            now: Epoch seconds.
            samples: Of each problem, by kind; 1 where there is none.
        """
        for kind, result in scores.items():
            each = (samples or {}).get(kind, 1)
            best = {"samples": each, "pass_at_k": result.best, "incomplete": result.incomplete}
            series = self.heldout if kind == GREEDY else self.heldout_sampled
            series.append(
                {
                    "version": version,
                    "seconds": self.seconds(now),
                    "score": result.score,
                    "size": result.count // each,
                    "failed": result.failed,
                    "sampled_by": [result.lowest_version, result.highest_version],
                    **(best if each > 1 else {}),
                }
            )


def summarise(record: Record, *, status: str, now: float) -> dict[str, Any]:
    """The content of `summary.json`.

    Args:
        record: The run so far.
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
        "mismatch": {kind: _mismatch(batches, kind) for kind in ("fresh", "crossed", "stale")},
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
    """Left out of training or trained late: groups by now, the rest as of the newest batch."""
    newest = record.batches[-1] if record.batches else {}
    return {
        "groups_filtered": record.accounting.get("dropped", {}).get("filtered", 0),
        "groups_let_through": newest.get("groups_let_through", 0),
        "prompts_retired": newest.get("prompts_retired", 0),
        "groups_overdue": newest.get("groups_overdue", 0),
    }


def samples_per_second(batches: Sequence[Row]) -> float | None:
    """Rollouts trained per second, from the first step's end of each sitting to its last one's."""
    sittings = _sittings(batches)
    seconds = sum(_span(rows) for rows in sittings)
    rollouts = sum(row["rollouts_trained"] for rows in sittings for row in rows[1:])
    return rollouts / seconds if seconds else None


def learner_idle(batches: Sequence[Row]) -> float | None:
    """Share of the same time in which the learner waited for a batch."""
    sittings = _sittings(batches)
    seconds = sum(_span(rows) for rows in sittings)
    waits = sum(
        row["wait_finished_at"] - row["wait_started_at"] for rows in sittings for row in rows[1:]
    )
    return waits / seconds if seconds else None


def _sittings(batches: Sequence[Row]) -> list[list[Row]]:
    """The batches of each loop of a learner, in order."""
    return [list(rows) for _, rows in groupby(batches, key=itemgetter("sitting_started_at"))]


def _span(rows: Sequence[Row]) -> float:
    """Seconds from the end of the first step to the end of the last one."""
    return float(rows[-1]["step_finished_at"] - rows[0]["step_finished_at"])


def _seconds_to_first_step(record: Record) -> float | None:
    if record.earlier.seconds_to_first_step is not None or not record.batches:
        return record.earlier.seconds_to_first_step
    return record.seconds(record.batches[0]["step_finished_at"])


def weight_sync(swaps: Sequence[Row]) -> dict[str, Any]:
    """Means over the successful updates in flight; the one that seeds a new engine is left out."""
    done = [row for row in swaps if row["error"] is None and not row["seeding"]]
    return {
        "updates": len(done),
        "failed": sum(row["error"] is not None for row in swaps),
        "pause_seconds_mean": _mean(
            row["pause_seconds"] + row["load_seconds"] + row["resume_seconds"] for row in done
        ),
        "publish_to_serving_seconds_mean": _mean(
            row["swap_finished_at"] - row["published_at"] for row in done
        ),
        "bytes_mean": _mean(row["bytes"] for row in done),
    }


def overlap(batches: Sequence[Row], swaps: Sequence[Row]) -> dict[str, int]:
    """How many updates reached an engine only after the learner had begun its next step.

    `queue_ready` counts the updates whose next batch was there when the version was published;
    in the others the learner waited for rollouts, not for the update.
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


def _mismatch(batches: Sequence[Row], kind: str) -> dict[str, Any]:
    """Mean |log current − log behaviour| over all tokens of one origin."""
    tokens = sum(row[f"tokens_{kind}"] for row in batches)
    total = sum(row[f"tokens_{kind}"] * (row[f"mismatch_{kind}"] or 0.0) for row in batches)
    return {"tokens": tokens, "mean_abs_logprob_difference": total / tokens if tokens else None}


def _mean(values: Any) -> float | None:
    present = [value for value in values if value is not None]
    return fmean(present) if present else None

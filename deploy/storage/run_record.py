"""The record of a run: everything that its driver has gathered so far."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deploy.config.evaluation_schedule import GREEDY, SAMPLED, PlannedEvaluation
from learner.diagnostics.batch_report import TrainedBatch
from queues.records import Evaluation
from weight_sync.announcements import WeightUpdateReport

Row = Mapping[str, Any]
"""One record of a JSON-lines file of the run."""

REWARD_MODEL = "reward-model"
"""Name of the process of the reward models in `restarts.jsonl`."""


@dataclass(frozen=True, slots=True)
class Earlier:
    """Figures of a resumed run's earlier sessions that its batches and swaps do not contain."""

    seconds: float = 0.0
    tokens_generated: int = 0
    seconds_to_first_step: float | None = None


@dataclass(slots=True)
class Record:
    """Everything that the driver has gathered about a run so far, in all of its sessions.

    A session is the time from a `headway run` or `headway resume` to its end.
    """

    name: str
    steps: int
    max_staleness: int
    started_at: float
    """Epoch seconds when the command began."""
    earlier: Earlier = field(default_factory=Earlier)
    batches: list[TrainedBatch] = field(default_factory=list)
    """Trained batches in the order of their versions."""
    swaps: list[WeightUpdateReport] = field(default_factory=list)
    """Attempts of the engines to take new weights."""
    heldout: list[Row] = field(default_factory=list)
    """Greedy evaluations: version, seconds, score, versions."""
    heldout_sampled: list[Row] = field(default_factory=list)
    """Evaluations at the training temperature."""
    actors: list[Row] = field(default_factory=list)
    """The newest statistics of each actor."""
    restarts: Counter[str] = field(default_factory=Counter)
    """Number of restarts of each process."""
    accounting: Row = field(default_factory=dict)

    @property
    def version(self) -> int:
        """Number of batches trained."""
        return len(self.batches)

    def seconds(self, now: float) -> float:
        """Return the seconds of all sessions until `now` (epoch seconds)."""
        return self.earlier.seconds + now - self.started_at

    @property
    def scored(self) -> set[int]:
        """Versions whose held-out scores are complete."""
        return {row["version"] for row in self.heldout}

    def newest_scores(self) -> dict[str, float]:
        """Return the newest held-out scores by kind; `pass@k` has its own entry."""
        scores = {}
        for kind, evaluations in ((GREEDY, self.heldout), (SAMPLED, self.heldout_sampled)):
            newest: Row = evaluations[-1] if evaluations else {}
            if newest.get("score") is not None:
                scores[kind] = newest["score"]
            if newest.get("pass_at_k") is not None:
                scores[f"pass@{newest['samples']}"] = newest["pass_at_k"]
        return scores

    def add_score(self, planned: PlannedEvaluation, result: Evaluation, *, now: float) -> None:
        """Add the result of an evaluation that was complete at `now` (epoch seconds)."""
        score = {
            "version": planned.version,
            "seconds": self.seconds(now),
            "score": result.score,
            "size": result.count // planned.samples,
            "failed": result.failed,
            "sampled_by": [result.lowest_version, result.highest_version],
        }
        if planned.samples > 1:
            score["samples"] = planned.samples
            score["pass_at_k"], score["incomplete"] = result.best, result.incomplete
        (self.heldout if planned.kind == GREEDY else self.heldout_sampled).append(score)

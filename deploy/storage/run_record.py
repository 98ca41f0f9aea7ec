"""The record of a run: what its driver has gathered so far."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deploy.config.evaluation_schedule import GREEDY
from queues.records import Evaluation

Row = Mapping[str, Any]


REWARD_MODEL = "reward-model"
"""What the process of the reward models is called in `restarts.jsonl`."""


@dataclass(frozen=True, slots=True)
class Earlier:
    """What a resumed run did before, as far as its batches and swaps do not tell."""

    seconds: float = 0.0
    tokens_generated: int = 0
    seconds_to_first_step: float | None = None


@dataclass(slots=True)
class Record:
    """What the driver has gathered of a run so far, in all of its sessions.

    A session is the time from a `headway run` or `headway resume` to its end.
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

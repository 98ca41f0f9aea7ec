"""The record of a run: everything that its driver has gathered so far, restored on resumption."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

from deploy.config.evaluation_schedule import GREEDY, SAMPLED, PlannedEvaluation
from deploy.config.run_config import RunConfig
from deploy.storage.jsonl import Say, mend_rows, rewrite_rows, set_aside
from deploy.storage.run_directory import RunDirectory
from headway.errors import InputError
from learner.diagnostics.batch_report import TrainedBatch
from queues.readers.accounting import read_batches
from queues.readers.open_run import open_ledger
from queues.records import Evaluation
from weight_sync.announcements import WeightUpdateReport
from weight_sync.probe import ProbeResult

Row = Mapping[str, Any]
"""One record of a JSON-lines file of the run."""

METRICS, SWAPS = "metrics.jsonl", "swaps.jsonl"
RESTARTS, RECOVERIES = "restarts.jsonl", "recoveries.jsonl"
PROBES, HACKING = "probes.jsonl", "hacking.jsonl"
LOGS = (
    "drift.jsonl", HACKING, PROBES, "samples.jsonl", "scalings.jsonl", "sessions.jsonl",
    "waits.jsonl",
)  # fmt: skip
"""Files that a session only adds to, besides those that a record is restored from."""


class Score(NamedTuple):
    """A held-out score, with the number of results that it is a mean of."""

    value: float | None
    """None where all failed."""
    scored: int
    """Rollouts with a reward; of pass@k, problems with rewards of all their rollouts."""
    failed: int
    """Rollouts or problems that were left out, since a reward or an environment failed."""

    @classmethod
    def of(cls, row: Row) -> "Score":
        """Return the mean reward of an evaluation, given as a row of `summary.json`."""
        return cls(row["score"], row["scored"], row["failed"])

    @classmethod
    def pass_at_k(cls, row: Row) -> "Score":
        """Return its pass@k."""
        return cls(row["pass_at_k"], row["size"] - row["incomplete"], row["incomplete"])

    def __str__(self) -> str:
        """Format as "0.500 (18 of 20, 2 failed)", and as "0.500" if none failed."""
        text = "–" if self.value is None else f"{self.value:.3f}"
        count = self.scored + self.failed
        return f"{text} ({self.scored} of {count}, {self.failed} failed)" if self.failed else text


@dataclass(frozen=True, slots=True)
class Earlier:
    """Figures of a resumed run's earlier sessions that its batches and swaps do not contain."""

    seconds: float = 0.0
    tokens_generated: int = 0
    seconds_to_first_step: float | None = None


EARLIER = tuple(Earlier.__dataclass_fields__)


@dataclass(slots=True)
class Record:
    """Everything that the driver has gathered about a run so far, in all of its sessions."""

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
    away: dict[str, float] = field(default_factory=dict)
    """Seconds from the deaths of each process until others had taken its place."""
    drifting: dict[str, bool] = field(default_factory=dict)
    """Engines that were compared with others, and whether each was found to drift."""
    probes: dict[str, ProbeResult] = field(default_factory=dict)
    """The newest comparison of each engine that was probed."""
    failed_probes: Counter[str] = field(default_factory=Counter)
    """Number of probes that each engine failed."""
    hackings: int = 0
    """Findings of this session that the reward is hacked."""
    accounting: Row = field(default_factory=dict)
    memory: Counter[str] = field(default_factory=Counter)
    """Peak resident bytes of roles whose processes of this session run on this machine."""

    @property
    def version(self) -> int:
        """Number of batches trained."""
        return len(self.batches)

    def seconds(self, now: float) -> float:
        """Return the seconds of all sessions until `now` (epoch seconds)."""
        return self.earlier.seconds + now - self.started_at

    def newest_scores(self) -> dict[str, Score]:
        """Return the newest held-out scores by kind; `pass@k` has its own entry."""
        scores = {}
        for kind, evaluations in ((GREEDY, self.heldout), (SAMPLED, self.heldout_sampled)):
            if not evaluations:
                continue
            newest = evaluations[-1]
            scores[kind] = Score.of(newest)
            if "pass_at_k" in newest:
                scores[f"pass@{newest['samples']}"] = Score.pass_at_k(newest)
        return scores

    def add_score(self, planned: PlannedEvaluation, result: Evaluation, *, now: float) -> None:
        """Add the result of an evaluation that was complete at `now` (epoch seconds)."""
        score = {
            "version": planned.version,
            "seconds": self.seconds(now),
            "score": result.score,
            "size": result.count // planned.samples,
            "scored": result.count - result.failed,
            "failed": result.failed,
            "sampled_by": [result.lowest_version, result.highest_version],
        }
        if planned.samples > 1:
            score["samples"] = planned.samples
            score["pass_at_k"], score["incomplete"] = result.best, result.incomplete
        (self.heldout if planned.kind == GREEDY else self.heldout_sampled).append(score)


def restore(config: RunConfig, directory: RunDirectory, *, now: float, say: Say) -> Record:
    """Return the record that a session begun at `now` (epoch seconds) goes on with.

    It is empty for a new run. The ledger has every batch; the driver's own files may end a little
    earlier or be damaged, and are mended, with a message by `say`.
    """
    record = Record(config.name, config.steps, config.queues.bound, started_at=now)
    if directory.ledger.exists():
        rows = read_batches(directory.path, verify=False)  # `find_checkpoint` has verified them
        record.batches = [TrainedBatch.from_dict(row) for row in rows]
        folder = directory.path
        record.swaps = mend_rows(folder / SWAPS, say, lambda row: WeightUpdateReport(**row))
        record.restarts = Counter(mend_rows(folder / RESTARTS, say, itemgetter("actor")))
        for name, seconds in mend_rows(folder / RECOVERIES, say, itemgetter("process", "seconds")):
            record.away[name] = record.away.get(name, 0.0) + seconds
        for name in LOGS:
            mend_rows(folder / name, say)
        written = mend_rows(folder / METRICS, say, lambda row: int(row["version"]))
        if (newest := max(written, default=-1)) >= record.version:
            say(
                f"{directory.ledger} ends at version {record.version}, but {METRICS} has batch "
                f"{newest}: the end of the ledger was lost, such as its -wal file, and what it had "
                "is sampled and trained anew"
            )
        rewrite_rows(folder / METRICS, [batch.to_dict() for batch in record.batches])
    if summary := _mend_summary(directory, record.batches, say):
        record.earlier = Earlier(**{name: summary[name] for name in EARLIER})
        record.heldout, record.heldout_sampled = summary["heldout"], summary["heldout_sampled"]
    return record


def _mend_summary(directory: RunDirectory, batches: Sequence[TrainedBatch], say: Say) -> Row:
    """Return the summary of the earlier sessions; empty for a new run.

    Without a summary the ledger serves: scores are collected from it again, the time is that from
    the first to the last batch of each session, and tokens count where they were accepted.
    """
    try:
        if summary := directory.summary(*EARLIER, "heldout", "heldout_sampled"):
            return summary
        if batches:
            file = directory.summary_file
            say(f"{file} is missing: its figures are made again from the ledger")
    except (InputError, OSError) as error:
        kept = set_aside(directory.summary_file)
        say(f"{error}; its figures are made again from the ledger, and the file is kept as {kept}")
    if not batches:
        return {}
    with open_ledger(directory.path, verify=False) as database:
        (tokens,) = database.execute("SELECT coalesce(sum(tokens), 0) FROM results").fetchone()
    ends = {batch.times.session_started_at: batch.times for batch in batches}
    return {
        "seconds": sum(times.published_at - begin for begin, times in ends.items()),
        "tokens_generated": tokens,
        "seconds_to_first_step": None,
        "heldout": [],
        "heldout_sampled": [],
    }

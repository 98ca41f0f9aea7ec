"""The timeline of some steps of a run: actors, queue, learner, weight updates; and its plot.

All times are epoch seconds.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from deploy.report.plots import new_figure
from deploy.report.summary import WARM_UP, sessions
from deploy.storage.run_directory import RunDirectory
from deploy.storage.run_record import Record
from learner.diagnostics.batch_report import TrainedBatch
from queues.readers.group_history import GroupTimes, History, read_history
from weight_sync.announcements import WeightUpdateReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STEPS = 10
"""Batches that a timeline shows."""
COLOURS = {
    "wait": "0.85",
    "step": "tab:blue",
    "publish": "tab:orange",
    "ack": "tab:green",
    "checkpoint": "tab:purple",
    "staging": "tab:olive",
    "prepare": "tab:pink",
    "permit": "0.7",
    "pause": "tab:red",
    "failed": "black",
}
LABEL: dict[str, Any] = {"rotation": 0, "ha": "right", "va": "center"}
ROW_INCHES = 0.75


@dataclass(frozen=True, slots=True)
class Span:
    """An activity with its start and end."""

    kind: str
    start: float
    end: float


Curve = Sequence[tuple[float, int]]
"""A count over time: (time, count from then on), in order; 0 before the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Activities in a window of a run."""

    first: int
    """The version of its first batch."""
    begin: float
    end: float
    actors: Mapping[str, Curve]
    """Rollouts being generated, by engine."""
    queue: Curve
    """Ready groups."""
    groups_per_batch: int
    learner: Sequence[Span]
    """Spans of the kinds wait, step, publish, ack and checkpoint."""
    updates: Mapping[str, Sequence[Span]]
    """By engine, spans of the kinds staging, prepare, permit, pause and failed."""

    @property
    def title(self) -> str:
        """The number of steps, and the version from which they are."""
        steps = sum(span.kind == "step" for span in self.learner)
        return f"Timeline: {steps} steps from version {self.first} on"


def read_timeline(directory: RunDirectory, record: Record) -> Timeline:
    """Read the timeline of the first STEPS batches after the warm-up, of at least one batch."""
    shown = window(record.batches, STEPS)
    last = shown[-1].version + record.max_staleness + 1
    history = read_history(directory.path, shown[0].version, last)
    groups_per_batch = directory.config().prompts.groups_per_batch
    return build(shown, record.swaps, history, groups_per_batch=groups_per_batch)


def window(batches: Sequence[TrainedBatch], count: int) -> Sequence[TrainedBatch]:
    """Choose up to `count` consecutive batches of one session, after the warm-up if possible."""
    start = max(0, min(WARM_UP, len(batches) - count))
    return next(iter(sessions(batches[start : start + count])), [])


def build(
    batches: Sequence[TrainedBatch],
    swaps: Sequence[WeightUpdateReport],
    history: History,
    *,
    groups_per_batch: int,
) -> Timeline:
    """Build the timeline of batches, from the wait for the first to the last acknowledgement."""
    begin, last = batches[0].times.wait_started_at, batches[-1]
    ready = overlaps((group.accepted_at, group.taken_at) for group in history.groups)
    end = history.acked_at.get(last.version) or last.times.published_at
    return Timeline(
        first=batches[0].version,
        begin=begin,
        end=end,
        actors={e: clip(c, begin, end) for e, c in running_rollouts(history.groups).items()},
        queue=clip(ready, begin, end),
        groups_per_batch=groups_per_batch,
        learner=learner_spans(batches, history.acked_at, history.checkpoints),
        updates={
            engine: [span for span in spans if begin <= span.start and span.end <= end]
            for engine, spans in update_spans(swaps).items()
        },
    )


def running_rollouts(groups: Iterable[GroupTimes]) -> dict[str, Curve]:
    """Count the rollouts being generated over time, by engine."""
    intervals: defaultdict[str, list[tuple[float, float | None]]] = defaultdict(list)
    for group in groups:
        intervals[group.engine_id] += group.rollouts
    return {engine: overlaps(intervals[engine]) for engine in sorted(intervals)}


def overlaps(intervals: Iterable[tuple[float, float | None]]) -> Curve:
    """Count the intervals that cover each moment; an end of None is infinite."""
    changes: Counter[float] = Counter()
    for start, end in intervals:
        changes[start] += 1
        if end is not None:
            changes[end] -= 1
    curve, count = [], 0
    for time in sorted(changes):
        if changes[time]:
            count += changes[time]
            curve.append((time, count))
    return curve


def clip(curve: Curve, begin: float, end: float) -> Curve:
    """Cut a curve to the time between two moments, with a point at both ends."""
    before = bisect_right(curve, begin, key=lambda point: point[0])
    count = curve[before - 1][1] if before else 0
    inside = [point for point in curve[before:] if point[0] < end]
    return [(begin, count), *inside, (end, inside[-1][1] if inside else count)]


def idle_share(curve: Curve, begin: float, end: float) -> float:
    """Return the share of the time between two moments in which a count was 0."""
    points = clip(curve, begin, end)
    idle = sum(after - time for (time, count), (after, _) in pairwise(points) if not count)
    return idle / (end - begin)


def learner_spans(
    batches: Sequence[TrainedBatch], acked_at: Mapping[int, float], checkpoints: Mapping[int, float]
) -> list[Span]:
    """List the learner's activities in order; waiting includes fetching and decoding the batch."""
    spans = []
    for batch in batches:
        version, times = batch.version, batch.times
        acked = acked_at.get(version, times.published_at)
        spans += [
            Span("wait", times.wait_started_at, times.wait_finished_at),
            Span("step", times.step_started_at, times.step_finished_at),
            Span("publish", times.step_finished_at, times.published_at),
            Span("ack", times.published_at, acked),
        ]
        if version + 1 in checkpoints:
            spans.append(Span("checkpoint", acked, checkpoints[version + 1]))
    return spans


def update_spans(swaps: Iterable[WeightUpdateReport]) -> dict[str, list[Span]]:
    """List the phases of each version's update of each engine, from its publication on."""
    spans: defaultdict[str, list[Span]] = defaultdict(list)
    for update in swaps:
        phases, published = spans[update.engine_id], update.published_at
        staged, started = update.staged_at, update.swap_started_at
        finished = update.swap_finished_at
        if staged is None or started is None or finished is None:
            last = next((time for time in (finished, started, staged) if time is not None), None)
            phases.append(Span("failed", published, published if last is None else last))
            continue
        prepared = staged + update.prepare_seconds
        phases += [
            Span("staging", published, staged),
            Span("prepare", staged, prepared),
            Span("permit", prepared, started),
            Span("pause", started, finished),
        ]
    return {engine: spans[engine] for engine in sorted(spans)}


def draw_timeline(timeline: Timeline) -> "Figure":
    """Draw a timeline: axes over a common time in seconds."""
    rows = 2 + len(timeline.actors) + len(timeline.updates)
    figure = new_figure(13, 1.2 + ROW_INCHES * rows)
    axes = figure.subplots(rows, 1, sharex=True)
    begin, end = timeline.begin, timeline.end
    left = iter(axes)
    for engine, curve in timeline.actors.items():
        _curve(next(left), curve, begin, f"{engine}\nrollouts", "tab:cyan")
    queue = next(left)
    _curve(queue, timeline.queue, begin, "queue\nready groups", "tab:brown")
    queue.axhline(timeline.groups_per_batch, color="0.4", lw=0.8, ls=":")
    _spans(next(left), timeline.learner, begin, "learner")
    for engine, spans in timeline.updates.items():
        _spans(next(left), spans, begin, f"{engine}\nupdates")
    steps = [span.start - begin for span in timeline.learner if span.kind == "step"]
    for version, start in enumerate(steps, timeline.first):
        for axis in axes:
            axis.axvline(start, color="0.6", lw=0.5, ls="--")
        at = ("data", "axes fraction")
        axes[0].annotate(f"v{version}", (start, 1.02), xycoords=at, fontsize=8)
    axes[-1].set(xlabel="seconds", xlim=(0, end - begin))
    return figure


def _curve(axes: "Axes", curve: Curve, begin: float, label: str, colour: str) -> None:
    times, counts = [time - begin for time, _ in curve], [count for _, count in curve]
    axes.fill_between(times, counts, step="post", color=colour, alpha=0.6, lw=0)
    axes.set_ylabel(label, **LABEL)
    axes.set_ylim(0, None)


def _spans(axes: "Axes", spans: Sequence[Span], begin: float, label: str) -> None:
    for kind in dict.fromkeys(span.kind for span in spans):
        bars = [(s.start - begin, s.end - s.start) for s in spans if s.kind == kind]
        axes.broken_barh(bars, (0, 1), color=COLOURS[kind], lw=0, label=kind)
    axes.set_yticks([])
    axes.set_ylim(0, 1)
    axes.set_ylabel(label, **LABEL)
    if spans:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=7, frameon=False)

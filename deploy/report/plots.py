"""The plots of a report, each a matplotlib figure of one subject for one run or several."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from deploy.report.summary import resumptions, successful_updates, version_seconds
from deploy.storage.run_record import Record
from headway.clean_text import printable
from learner.diagnostics.batch_report import BatchReport, TrainedBatch
from queues.readers.selection_bias import FATES, BiasReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE = (4.4, 2.8)
"""Inches; readable at the width of a phone."""
COLOURS = ("#1f6fb4", "#d9600f", "#2a8f3c", "#b1312f", "#7a56a8", "#7d5a4f", "#c2559d", "#666666")
"""Colours of runs, in order."""
GREY = "#8a939c"
LONGEST_LABEL = 60
MOST_PARTS = 32
"""Curves of parts of the reward."""
WINDOW = 15
"""Number of batches that throughput and idle time are averaged over."""
VERSIONS, SECONDS = "policy version", "seconds of training"
"""Labels of horizontal axes on which resumptions are marked."""


@dataclass(frozen=True, slots=True)
class PlottedRun:
    """The data of a run that plots show."""

    label: str
    record: Record
    bias: BiasReport
    colour: str
    figures: Mapping[str, str]
    """Figures by name; a run may lack some."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Its recipe, as JSON values."""
    notes: Sequence[str] = ()
    """Its resumptions, and the program and machine of its last session."""


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot of the page."""

    title: str
    description: str
    draw: Callable[["Figure", Sequence[PlottedRun]], None]
    applies: Callable[[PlottedRun], bool] = lambda run: True
    """Return False if there is nothing to draw of a run; without any, the plot is left out."""


def new_figure(width: float, height: float) -> "Figure":
    """Return an empty figure of a size in inches that is saved as SVG."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)
    return figure


def figure_of(plot: Plot, runs: Sequence[PlottedRun]) -> "Figure":
    """Draw a plot."""
    figure = new_figure(*SIZE)
    plot.draw(figure, runs)
    for axes in figure.axes:
        for run in runs:
            _mark_resumptions(axes, run, run.colour if len(runs) > 1 else GREY)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(visible=True, alpha=0.25, lw=0.6)
        axes.tick_params(labelsize=8)
    return figure


def smooth(values: Sequence[float], width: int = WINDOW) -> list[float]:
    """Return the mean of each value and those before it, of at most `width` values."""
    return [
        sum(part) / len(part)
        for part in (values[max(0, end - width) : end] for end in range(1, len(values) + 1))
    ]


def throughput(batches: Sequence[TrainedBatch]) -> tuple[list[float], list[float]]:
    """Return seconds since the first step, and rollouts trained per second over WINDOW batches.

    The first batch of a session is left out, since its beginning is not known. Means over fewer
    batches, at the beginning of a session, are left out too unless there are no others.
    """
    points: list[tuple[float, float, int]] = []
    passed = 0.0
    recent: list[tuple[int, float]] = []
    for before, batch in pairwise(batches):
        if before.times.session_started_at != batch.times.session_started_at:
            recent = []
            continue
        took = batch.times.step_finished_at - before.times.step_finished_at
        passed += took
        recent = [*recent, (batch.report.rollouts_trained, took)][-WINDOW:]
        window = sum(duration for _, duration in recent)
        if window > 0:
            points.append((passed, sum(rollouts for rollouts, _ in recent) / window, len(recent)))
    whole = [point for point in points if point[2] == WINDOW] or points
    return [seconds for seconds, _, _ in whole], [rate for _, rate, _ in whole]


def waiting(batches: Sequence[TrainedBatch]) -> tuple[list[int], list[float]]:
    """Return versions, and percentages of their time spent waiting, over WINDOW batches."""
    times = [batch.times for batch in batches]
    waits = [time.wait_seconds for time in times]
    whole = [time.published_at - time.wait_started_at for time in times]
    sums = zip(smooth(waits), smooth(whole), strict=True)
    shares = [100 * wait / time if time > 0 else 0.0 for wait, time in sums]
    return [batch.version for batch in batches], shares


def _mark_resumptions(axes: "Axes", run: PlottedRun, colour: str) -> None:
    """Draw a dotted line wherever a later session of the run began."""
    resumed, seconds = resumptions(run.record.batches), version_seconds(run.record.batches)
    marks: Mapping[str, Sequence[float]] = {
        VERSIONS: resumed,
        SECONDS: [seconds[version] for version in resumed],
    }
    for mark in marks.get(axes.get_xlabel(), ()):
        axes.axvline(mark, color=colour, lw=1, ls=(0, (1, 3)))


def _reward(figure: "Figure", runs: Sequence[PlottedRun], xlabel: str = VERSIONS) -> None:
    axes = figure.subplots()
    for run in runs:
        batches = run.record.batches
        seconds = version_seconds(batches)
        label = f"{run.label}: " if len(runs) > 1 else ""
        versions, rewards = _points(batches, lambda report: report.reward_mean)
        if rewards:
            xs = versions if xlabel == VERSIONS else [seconds[version] for version in versions]
            axes.plot(xs, rewards, color=run.colour, label=f"{label}training", lw=0.9, alpha=0.55)
        best = [row for row in run.record.heldout_sampled if "pass_at_k" in row]
        for series, key, marker, name in (
            (run.record.heldout, "score", "o-", "held-out, greedy"),
            (run.record.heldout_sampled, "score", "s:", "held-out, sampled"),
            (best, "pass_at_k", "^--", f"pass@{best[-1]['samples']}" if best else ""),
        ):
            scored = {row["version"]: row[key] for row in series if row[key] is not None}
            if xlabel == SECONDS:
                scored = {seconds[v]: score for v, score in scored.items() if v in seconds}
            if scored:
                curve = axes.plot(*zip(*scored.items(), strict=True), marker, color=run.colour)
                curve[0].set(label=f"{label}{name}", markersize=3.5, linewidth=1.4)
    _finish(axes, xlabel, legend=True)


def _line_of_each_run(
    curve: Callable[[Sequence[TrainedBatch]], tuple[Sequence[float], Sequence[float]]],
    xlabel: str,
    ylabel: str,
    top: float | None = None,
    bottom: float | None = 0,
) -> Callable[["Figure", Sequence[PlottedRun]], None]:
    """Return a function that draws one curve of the batches of each run, on one vertical axis."""

    def draw(figure: "Figure", runs: Sequence[PlottedRun]) -> None:
        axes = figure.subplots()
        for run in runs:
            axes.plot(*curve(run.record.batches), color=run.colour, lw=1.4, label=run.label)
        axes.set_ylim(bottom, top)
        _finish(axes, xlabel, ylabel, legend=len(runs) > 1)

    return draw


def _figure_plot(
    title: str,
    description: str,
    figure: Callable[[BatchReport], float | None],
    ylabel: str = "",
    *,
    bottom: float | None = 0,
) -> Plot:
    """Return a plot of one figure of the batches over the versions."""

    def curve(batches: Sequence[TrainedBatch]) -> tuple[list[int], list[float]]:
        return _points(batches, figure)

    return Plot(
        title,
        description,
        _line_of_each_run(curve, VERSIONS, ylabel, bottom=bottom),
        applies=lambda run: bool(curve(run.record.batches)[0]),
    )


def _part_names(run: PlottedRun) -> list[str]:
    """Return the names of the parts of a run's reward, of all batches, the first in order."""
    reports = [batch.report for batch in run.record.batches]
    names = {name for report in reports for name in report.reward_parts or ()}
    return sorted(names)[:MOST_PARTS]


def _reward_parts(figure: "Figure", runs: Sequence[PlottedRun]) -> None:
    axes = figure.subplots()
    for run in runs:
        for index, name in enumerate(_part_names(run)):
            part = partial(lambda report, name: (report.reward_parts or {}).get(name), name=name)
            colour = run.colour if len(runs) > 1 else COLOURS[index % len(COLOURS)]
            label = f"{run.label}: {name}" if len(runs) > 1 else name
            style = ("-", "--", ":", "-.")[index % 4 if len(runs) > 1 else 0]
            versions, values = _points(run.record.batches, part)
            axes.plot(versions, values, color=colour, label=label, lw=1.2, ls=style)
    _finish(axes, VERSIONS, legend=True)


def _lag(figure: "Figure", runs: Sequence[PlottedRun]) -> None:
    left, right = figure.subplots(1, 2, width_ratios=[2, 1])
    for run in runs:
        _line(left, run, lambda report: report.lag_mean, label="mean", lw=1.4)
        _line(left, run, lambda report: report.max_lag, label="largest", lw=0.8, ls=":")
        bound = run.record.max_staleness
        left.axhline(bound, color=run.colour, lw=0.7, ls="--", label="max_staleness")
    left.set_ylim(0, None)
    _finish(left, VERSIONS, "lag, versions", legend=len(runs) == 1)
    width = 0.8 / len(runs)
    trained_lags: set[int] = set()
    for index, run in enumerate(runs):
        count: Counter[int] = Counter()
        for batch in run.record.batches:
            count.update(batch.report.lag_histogram)
        trained_lags |= count.keys()
        positions = [lag - 0.4 + width * (index + 0.5) for lag in count]
        shares = [100 * tokens / (count.total() or 1) for tokens in count.values()]
        right.bar(positions, shares, width, color=run.colour)
    right.set_xticks(sorted(trained_lags))
    _finish(right, "lag", "% of trained tokens")


def _ess(figure: "Figure", runs: Sequence[PlottedRun]) -> None:
    upper, lower = figure.subplots(2, 1, sharex=True)
    for run in runs:
        _line(upper, run, lambda report: report.ess, label=run.label, lw=1.4)
        for origin, style in (("fresh", "-"), ("crossed", "--"), ("stale", ":")):
            kl = partial(lambda report, origin: report.origins[origin].kl, origin=origin)
            _line(lower, run, kl, label=origin, lw=1.1, ls=style)
    _finish(upper, "", "ESS / tokens", legend=len(runs) > 1)
    _finish(lower, VERSIONS, "KL, nats/token", legend=len(runs) == 1)


def _left_out(figure: "Figure", runs: Sequence[PlottedRun]) -> None:
    measures = (("seconds", "seconds"), ("tokens", "tokens per rollout"), ("reward", "reward"))
    rows = [
        (run, fate, f"{run.label}: {fate}" if len(runs) > 1 else fate)
        for run in runs
        for fate in FATES
        if run.bias.groups[fate]
    ]
    for axes, (measure, title) in zip(figure.subplots(1, 3, sharey=True), measures, strict=True):
        for y, (run, fate, _) in enumerate(rows):
            spread = run.bias.fates[fate][measure]
            if spread.count:
                axes.plot([spread.p50, spread.p95], [y, y], color=run.colour, lw=3, alpha=0.4)
                axes.plot([spread.mean], [y], "o", color=run.colour, ms=5)
        labels = [plain(f"{label} ({run.bias.groups[fate]})") for run, fate, label in rows]
        axes.set_yticks(range(len(rows)), labels)
        axes.set_ylim(max(1, len(rows)) - 0.5, -0.5)
        _finish(axes, title)


def _weight_sync(figure: "Figure", runs: Sequence[PlottedRun]) -> None:
    axes = figure.subplots()
    for run in runs:
        done = successful_updates(run.record.swaps)
        versions = [update.version for update in done]
        serving = [taken for update in done if (taken := update.serving_seconds) is not None]
        stopped = [update.stalled_seconds for update in done]
        prefix = f"{run.label}: " if len(runs) > 1 else ""
        colour = run.colour if len(runs) > 1 else COLOURS[1]
        axes.plot(
            versions, serving, ".", color=run.colour, ms=3, label=f"{prefix}published to serving"
        )
        axes.plot(versions, stopped, "x", color=colour, ms=3, label=f"{prefix}engine stopped")
    axes.set_yscale("log")
    _finish(axes, VERSIONS, "seconds", legend=True)


PLOTS = (
    Plot("Reward", "Mean reward of each batch, and scores of held-out prompts.", _reward),
    Plot(
        "Reward over time",
        "The same, over the seconds in which the run trained, pauses between sessions left out.",
        partial(_reward, xlabel=SECONDS),
    ),
    Plot(
        "Reward by part",
        "Mean of each part of the reward, unweighted.",
        _reward_parts,
        applies=lambda run: len(_part_names(run)) > 1,
    ),
    Plot(
        "Throughput",
        f"Rollouts trained per second, over {WINDOW} batches.",
        _line_of_each_run(throughput, "seconds since the first step", "rollouts/s"),
    ),
    Plot(
        "Learner idle",
        f"Share of time spent waiting for a batch, over {WINDOW} batches.",
        _line_of_each_run(waiting, VERSIONS, "% of the learner's time", 100),
    ),
    Plot("Lag of trained tokens", "Versions between sampling and training.", _lag),
    Plot(
        "Off-policyness",
        "Effective sample size; KL(sampler ‖ learner) of rollouts sampled wholly at the trained "
        "version (fresh), across an update with a kept KV cache (crossed), or earlier (stale).",
        _ess,
    ),
    _figure_plot(
        "Response length",
        "Mean response length of each batch.",
        lambda report: report.response_length_mean,
        "sampled tokens per rollout",
    ),
    _figure_plot("Loss", "With penalties, of each batch.", lambda report: report.loss, bottom=None),
    _figure_plot(
        "Gradient norm",
        "Before clipping, mean over the optimizer steps of a batch.",
        lambda report: report.grad_norm,
    ),
    _figure_plot(
        "Entropy",
        "Of the policy, over trained tokens.",
        lambda report: report.entropy_mean,
        "nats a token",
    ),
    _figure_plot(
        "Learning rate",
        "Of the last optimizer step of each batch.",
        lambda report: report.learning_rate,
    ),
    Plot(
        "Left out, and trained",
        "Groups by outcome: mean (dot), median to 95th percentile (line). Of aborted groups only "
        "the seconds are known, as a lower bound.",
        _left_out,
        lambda run: any(run.bias.groups[fate] for fate in FATES if fate != "trained"),
    ),
    Plot("Weight updates", "One mark per engine and version.", _weight_sync),
)


def _points(
    batches: Sequence[TrainedBatch], figure: Callable[[BatchReport], float | None]
) -> tuple[list[int], list[float]]:
    """Return versions and values of one figure of the batches that have it."""
    points = [(batch.version, figure(batch.report)) for batch in batches]
    known = [(version, value) for version, value in points if value is not None]
    return [version for version, _ in known], [value for _, value in known]


def _line(
    axes: "Axes", run: PlottedRun, figure: Callable[[BatchReport], float | None], **style: Any
) -> None:
    versions, values = _points(run.record.batches, figure)
    if values:
        axes.plot(versions, values, color=run.colour, **style)


def _finish(axes: "Axes", xlabel: str, ylabel: str = "", *, legend: bool = False) -> None:
    axes.set_xlabel(xlabel, fontsize=8)
    axes.set_ylabel(ylabel, fontsize=8)
    handles, labels = axes.get_legend_handles_labels()
    if legend and handles:
        axes.legend(handles, list(map(plain, labels)), fontsize=7, frameon=False)


def plain(label: str) -> str:
    """Return a name from outside without formulas and characters that SVG forbids."""
    label = printable(label).replace("\n", " ")
    short = label if len(label) <= LONGEST_LABEL else f"{label[: LONGEST_LABEL - 1]}…"
    return short.replace("$", r"\$")

"""The plots of a report, each a matplotlib figure of one subject for one run or several."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from deploy.report.summary import resumptions, sessions, successful_updates, version_seconds
from deploy.storage.run_record import Record
from headway.clean_text import printable
from learner.diagnostics.batch_report import BatchReport, TrainedBatch
from queues.readers.selection_bias import FATES, BiasReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE = (4.4, 2.8)
"""Inches; readable at the width of a phone."""
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999", "#000000")
"""Of runs, in order: those of Okabe and Ito, which the colour-blind can tell apart, with grey in
place of yellow."""
GREY = "#8a939c"
LONGEST_LABEL = 60
MOST_PARTS = 32
"""Curves of parts of the reward."""
LINES = ("-", "--", ":", "-.")
WINDOW = 15
"""Number of batches that throughput and idle time are averaged over."""
VERSIONS, SECONDS = "policy version", "seconds of training"
"""Labels of horizontal axes on which resumptions are marked."""

Points = Sequence[tuple[Any, float]]


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


class Curve(NamedTuple):
    """A curve of a run."""

    name: str
    """What it shows; empty for the only curve of a run."""
    points: Points
    style: Mapping[str, Any] = {}
    """Options of `Axes.plot`; a colour holds where the run is alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Axes with the same curves of each run."""

    curves: Callable[[PlottedRun], Iterable[Curve]]
    xlabel: str = VERSIONS
    ylabel: str = ""
    bottom: float | None = 0
    """Lowest value shown; None adapts it to the points."""
    scale: str = "linear"
    crowded: bool = False
    """True if the curves of several runs are too many for a legend."""

    def draw(self, axes: "Axes", runs: Sequence[PlottedRun]) -> None:
        """Draw the curves that have points."""
        several = len(runs) > 1
        for run in runs:
            for name, points, style in self.curves(run):
                if points:
                    label = f"{run.label}: {name}" if several and name else name or run.label
                    options = {"lw": 1.4, "color": run.colour, **style}
                    options |= {"color": run.colour} if several else {}
                    axes.plot(*zip(*points, strict=True), label=plain(label), **options)
        axes.set_yscale(self.scale)
        axes.set_ylim(self.bottom)
        _label(axes, self.xlabel, self.ylabel)
        if len(axes.get_lines()) > 1 and not (several and self.crowded):
            axes.legend(fontsize=7, frameon=False)


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot of the page."""

    title: str
    description: str
    draw: Callable[["Figure", Sequence[PlottedRun]], None]
    """Draws some runs, or nothing if there is nothing to draw of them."""

    @classmethod
    def of(cls, title: str, description: str, *panels: Panel) -> "Plot":
        """Return a plot of panels one above the other."""

        def draw(figure: "Figure", runs: Sequence[PlottedRun]) -> None:
            column = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
            for panel, axes in zip(panels, column, strict=True):
                panel.draw(axes, runs)

        return cls(title, description, draw)


def new_figure(width: float, height: float) -> "Figure":
    """Return an empty figure of a size in inches that is saved as SVG."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)
    return figure


def save_picture(figure: "Figure", path: Path) -> None:
    """Write a figure as `path` with the suffixes .png and .svg."""
    figure.savefig(path.with_suffix(".png"), dpi=150)
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})


def figure_of(plot: Plot, runs: Sequence[PlottedRun]) -> "Figure | None":
    """Draw a plot, with a dotted line where a later session began; None if it shows nothing."""
    figure = new_figure(*SIZE)
    plot.draw(figure, runs)
    if not any(axes.has_data() for axes in figure.axes):
        return None
    for axes in figure.axes:
        for run in runs:
            seconds = version_seconds(run.record.batches)
            for version in resumptions(run.record.batches):
                at = {VERSIONS: version, SECONDS: seconds[version]}.get(axes.get_xlabel())
                if at is not None:
                    colour = run.colour if len(runs) > 1 else GREY
                    axes.axvline(at, color=colour, lw=1, ls=(0, (1, 3)))
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


def throughput(batches: Sequence[TrainedBatch]) -> Points:
    """Return seconds since the first step, and rollouts trained per second over WINDOW batches.

    The first batch of a session is left out, since its beginning is not known. Means over fewer
    batches, at the beginning of a session, are left out too unless there are no others.
    """
    points: list[tuple[float, float]] = []
    whole: list[tuple[float, float]] = []
    passed = 0.0
    for session in sessions(batches):
        ends = [batch.times.step_finished_at for batch in session]
        took = [end - before for before, end in pairwise(ends)]
        rollouts = smooth([batch.report.rollouts_trained for batch in session[1:]])
        for index, (seconds, mean) in enumerate(zip(took, smooth(took), strict=True)):
            passed += seconds
            if mean > 0:
                points.append((passed, rollouts[index] / mean))
                whole += points[-1:] if index >= WINDOW - 1 else []
    return whole or points


def waiting(batches: Sequence[TrainedBatch]) -> Points:
    """Return versions, and percentages of their time spent waiting, over WINDOW batches."""
    times = [batch.times for batch in batches]
    waits = smooth([time.wait_seconds for time in times])
    whole = smooth([time.published_at - time.wait_started_at for time in times])
    return [
        (batch.version, 100 * wait / time if time > 0 else 0.0)
        for batch, wait, time in zip(batches, waits, whole, strict=True)
    ]


def _points(run: PlottedRun, figure: Callable[[BatchReport], float | None]) -> Points:
    """Return versions and values of one figure of the batches that have it."""
    points = [(batch.version, figure(batch.report)) for batch in run.record.batches]
    return [(version, value) for version, value in points if value is not None]


def _rewards(run: PlottedRun, *, over_seconds: bool = False) -> Iterator[Curve]:
    record, seconds = run.record, version_seconds(run.record.batches)

    def over(points: Points) -> Points:
        return [(seconds[x], y) for x, y in points if x in seconds] if over_seconds else points

    yield Curve("training", over(_points(run, lambda r: r.reward_mean)), {"lw": 0.9, "alpha": 0.55})
    best = [row for row in record.heldout_sampled if "pass_at_k" in row]
    for name, rows, key, marker, line in (
        ("held-out, greedy", record.heldout, "score", "o", "-"),
        ("held-out, sampled", record.heldout_sampled, "score", "s", ":"),
        (f"pass@{best[-1]['samples']}" if best else "", best, "pass_at_k", "^", "--"),
    ):
        scores = {row["version"]: row[key] for row in rows if row[key] is not None}
        yield Curve(name, over([*scores.items()]), {"marker": marker, "ls": line, "ms": 3.5})


def _by_name(run: PlottedRun, *, figure: str, fewest: int) -> Iterator[Curve]:
    """Yield a figure that has several names, the first of those of all batches, if so many."""
    values = attrgetter(figure)
    names = {name for batch in run.record.batches for name in values(batch.report) or ()}
    for index, name in enumerate(sorted(names)[:MOST_PARTS] if len(names) >= fewest else ()):
        value = partial(lambda report, name: (values(report) or {}).get(name), name=name)
        style = {"color": COLOURS[index % len(COLOURS)], "ls": LINES[index % len(LINES)], "lw": 1.2}
        yield Curve(name, _points(run, value), style)


def _gold(run: PlottedRun, names: Sequence[str]) -> Iterator[Curve]:
    for name, line in zip(names, LINES, strict=False):
        figure = partial(lambda report, name: report.gold and report.gold.means[name], name=name)
        yield Curve(name, _points(run, figure), {"ls": line})


def _lags(run: PlottedRun) -> Iterator[Curve]:
    yield Curve("mean", _points(run, lambda report: report.lag_mean))
    yield Curve("largest", _points(run, lambda report: report.max_lag), {"lw": 0.8, "ls": ":"})
    bound = _points(run, lambda report: run.record.max_staleness)
    yield Curve("max_staleness", bound, {"lw": 0.7, "ls": "--"})
    flows = [(batch.version, batch.flow.get("staleness_window")) for batch in run.record.batches]
    window = [(version, w) for version, w in flows if w is not None]
    yield Curve("window", window, {"lw": 0.9, "ls": "-.", "drawstyle": "steps-post"})


def _draw_lag(figure: "Figure", runs: Sequence[PlottedRun]) -> None:
    left, right = figure.subplots(1, 2, width_ratios=[2, 1])
    Panel(curves=_lags, ylabel="lag, versions", crowded=True).draw(left, runs)
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
    _label(right, "lag", "% of trained tokens")


def _divergences(run: PlottedRun) -> Iterator[Curve]:
    for origin, line in zip(("fresh", "crossed", "stale"), LINES, strict=False):
        kl = partial(lambda report, origin: report.origins[origin].kl, origin=origin)
        yield Curve(origin, _points(run, kl), {"lw": 1.1, "ls": line})


def _draw_left_out(figure: "Figure", runs: Sequence[PlottedRun]) -> None:
    measures = (("seconds", "seconds"), ("tokens", "tokens per rollout"), ("reward", "reward"))
    rows = [
        (run, fate, f"{run.label}: {fate}" if len(runs) > 1 else fate)
        for run in runs
        for fate in FATES
        if run.bias.groups[fate]
    ]
    if all(fate == "trained" for _, fate, _ in rows):
        return
    for axes, (measure, title) in zip(figure.subplots(1, 3, sharey=True), measures, strict=True):
        for y, (run, fate, _) in enumerate(rows):
            spread = run.bias.fates[fate][measure]
            if spread.count:
                axes.plot([spread.p50, spread.p95], [y, y], color=run.colour, lw=3, alpha=0.4)
                axes.plot([spread.mean], [y], "o", color=run.colour, ms=5)
        labels = [plain(f"{label} ({run.bias.groups[fate]})") for run, fate, label in rows]
        axes.set_yticks(range(len(rows)), labels)
        axes.set_ylim(max(1, len(rows)) - 0.5, -0.5)
        _label(axes, title)


def _weight_updates(run: PlottedRun) -> Iterator[Curve]:
    done = successful_updates(run.record.swaps)
    served = [(update.version, update.serving_seconds) for update in done]
    known = [(version, seconds) for version, seconds in served if seconds is not None]
    stopped = [(update.version, update.stalled_seconds) for update in done]
    marks = {"ls": "", "ms": 3}
    yield Curve("published to serving", known, {"marker": ".", **marks})
    yield Curve("engine stopped", stopped, {"marker": "x", "color": COLOURS[1], **marks})


def _figure(figure: Callable[[BatchReport], float | None], **options: Any) -> Panel:
    """Return a panel with one figure of the batches of each run."""
    return Panel(curves=lambda run: [Curve("", _points(run, figure))], **options)


PLOTS = (
    Plot.of(
        "Reward",
        "Mean reward of each batch, and scores of held-out prompts.",
        Panel(curves=_rewards, bottom=None),
    ),
    Plot.of(
        "Reward over time",
        "The same, over the seconds in which the run trained, pauses between sessions left out.",
        Panel(curves=partial(_rewards, over_seconds=True), xlabel=SECONDS, bottom=None),
    ),
    Plot.of(
        "Reward by part",
        "Mean of each part of the reward, unweighted.",
        Panel(curves=partial(_by_name, figure="reward_parts", fewest=2), bottom=None),
    ),
    Plot.of(
        "Divergence from teachers",
        "Mean of each teacher of a distillation, over the trained tokens that it teaches.",
        Panel(
            curves=partial(_by_name, figure="teacher_divergence", fewest=1),
            ylabel="nats/token",
            bottom=None,
        ),
    ),
    Plot.of(
        "Reward against gold reward",
        "On the prompts with a gold reward: both, and of their completions the share that ended by "
        "themselves (finished) and that of different token pairs (distinct).",
        Panel(curves=partial(_gold, names=("reward", "gold")), bottom=None),
        Panel(curves=partial(_gold, names=("finished", "distinct"))),
    ),
    Plot.of(
        "Throughput",
        f"Rollouts trained per second, over {WINDOW} batches.",
        Panel(
            curves=lambda run: [Curve("", throughput(run.record.batches))],
            xlabel="seconds since the first step",
            ylabel="rollouts/s",
        ),
    ),
    Plot.of(
        "Learner idle",
        f"Share of time spent waiting for a batch, over {WINDOW} batches.",
        Panel(
            curves=lambda run: [Curve("", waiting(run.record.batches))],
            ylabel="% of the learner's time",
        ),
    ),
    Plot("Lag of trained tokens", "Versions between sampling and training.", _draw_lag),
    Plot.of(
        "Off-policyness",
        "Effective sample size; KL(sampler ‖ learner) of rollouts sampled wholly at the trained "
        "version (fresh), across an update with a kept KV cache (crossed), or earlier (stale).",
        _figure(lambda report: report.ess, xlabel="", ylabel="ESS / tokens", bottom=None),
        Panel(curves=_divergences, ylabel="KL, nats/token", bottom=None, crowded=True),
    ),
    Plot.of(
        "Response length",
        "Mean response length of each batch.",
        _figure(lambda report: report.response_length_mean, ylabel="sampled tokens per rollout"),
    ),
    Plot.of("Loss", "With penalties, of each batch.", _figure(lambda r: r.loss, bottom=None)),
    Plot.of(
        "Gradient norm",
        "Before clipping, mean over the optimizer steps of a batch.",
        _figure(lambda report: report.grad_norm),
    ),
    Plot.of(
        "Entropy",
        "Of the policy, over trained tokens.",
        _figure(lambda report: report.entropy_mean, ylabel="nats a token"),
    ),
    Plot.of(
        "Learning rate",
        "Of the last optimizer step of each batch.",
        _figure(lambda report: report.learning_rate),
    ),
    Plot(
        "Left out, and trained",
        "Groups by outcome: mean (dot), median to 95th percentile (line). Of aborted groups only "
        "the seconds are known, as a lower bound.",
        _draw_left_out,
    ),
    Plot.of(
        "Weight updates",
        "One mark per engine and version.",
        Panel(curves=_weight_updates, ylabel="seconds", bottom=None, scale="log"),
    ),
)


def _label(axes: "Axes", xlabel: str, ylabel: str = "") -> None:
    axes.set_xlabel(xlabel, fontsize=8)
    axes.set_ylabel(ylabel, fontsize=8)


def plain(label: str) -> str:
    """Return a name from outside without formulas and characters that SVG forbids."""
    label = printable(label).replace("\n", " ")
    short = label if len(label) <= LONGEST_LABEL else f"{label[: LONGEST_LABEL - 1]}…"
    return short.replace("$", r"\$")

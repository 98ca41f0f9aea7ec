"""The table and the picture that `headway bench async` ends with."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from deploy.report.timeline import Timeline
from deploy.report.timeline_plot import draw_timeline, height

COLUMNS = {
    "samples/s": ("samples_per_second", "{:.1f}"),
    "of\nlimit": ("ratio_to_limit", "{:.2f}"),
    "learner\nidle": ("learner_idle", "{:.0%}"),
    "actors\nidle": ("actors_idle", "{:.0%}"),
    "lag\nmean": ("lag_mean", "{:.2f}"),
    "lag\nmax": ("lag_max", "{:.0f}"),
    "ESS": ("ess", "{:.3f}"),
    "tokens/\nrollout": ("tokens_per_rollout", "{:.1f}"),
}


def show(document: Mapping[str, Any], console: Console) -> None:
    """Prints the medians."""
    medians, limits = document["medians"], document["medians"]["limits"]
    title = f"medians of {len(document['rounds'])} round(s), {document['steps']} steps"
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("η", no_wrap=True)
    for title in COLUMNS:
        table.add_column(title, justify="right")
    for name in sorted(medians["arms"], key=_order):
        figures = medians["arms"][name]
        table.add_row(name, *(form.format(figures[key]) for key, form in COLUMNS.values()))
    console.print(table)
    console.print(
        f"limit {limits['samples_per_second']:.1f} samples/s: actors alone {limits['actors']:.1f}, "
        f"learner on a full queue {limits['learner']:.1f}\n"
        f"the first {document['warm_up_steps_left_out']} steps are left out everywhere; "
        f"load average at the start {document['machine']['load_average'][0]:.1f}"
    )


def draw(document: Mapping[str, Any], timeline: Timeline | None, file: Path) -> None:
    """Writes the picture: throughput against η, and the reference arm's timeline below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    heights = [4.5] + ([height(timeline)] if timeline else [])
    figure = Figure(figsize=(12, sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    _throughput(parts[0].subplots(), document)
    if timeline:
        steps = sum(span.kind == "step" for span in timeline.learner)
        draw_timeline(parts[1], timeline, f"η = {document['reference_bound']}: {steps} steps")
    figure.savefig(file, dpi=110)


def _throughput(axes: Any, document: Mapping[str, Any]) -> None:
    medians, rounds = document["medians"], document["rounds"]
    split = sorted((n for n in medians["arms"] if n.isdigit()), key=int)
    bounds = [int(name) for name in split]
    speeds = [medians["arms"][name]["samples_per_second"] for name in split]
    axes.plot(bounds, speeds, "o-", color="tab:blue", label="split cores, median")
    for name in medians["arms"]:
        marks = [each["arms"][name]["samples_per_second"] for each in rounds]
        colour = "tab:blue" if name in split else "tab:orange"
        place = int(name) if name in split else 0
        axes.plot([place] * len(marks), marks, ".", color=colour, alpha=0.5)
        if name not in split:
            middle = medians["arms"][name]["samples_per_second"]
            axes.plot([0], [middle], "s", color=colour, label="synchronous, all cores in turn")
    limits = medians["limits"]
    axes.axhline(limits["samples_per_second"], color="black", label="limit: the smaller of both")
    axes.axhline(limits["actors"], color="tab:cyan", ls=":", label="actors alone")
    axes.axhline(limits["learner"], color="tab:purple", ls=":", label="learner on a full queue")
    axes.set(
        title="What asynchrony gains",
        xlabel="max_staleness η (0 is synchronous)",
        ylabel="samples trained per second",
        ylim=(0, None),
        xticks=sorted({0, *bounds}),
    )
    axes.legend(fontsize=8)


def _order(name: str) -> tuple[int, bool]:
    return int(name.split(",")[0]), not name.isdigit()

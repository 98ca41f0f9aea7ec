"""Tables and panels of pictures that comparisons of training runs share."""

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from benchmarks.harness.plots import plot_means
from benchmarks.harness.tables import Columns, text_table

Run = Mapping[str, Any]
"""Figures of one run, with its name, seed and kind."""
Groups = Mapping[str, Sequence[Run]]
"""Runs by name: one for each seed or round."""
BOUND = "bound"
"""Kind of the runs whose name is a value of max_staleness."""
SYNCHRONOUS = "0"
UNBOUNDED = "inf"


def group(runs: Sequence[Run], kind: str) -> dict[str, list[Run]]:
    """Return the runs of a kind by name, in the order of the first seed; bounds by size."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        if run["kind"] == kind:
            groups.setdefault(run["name"], []).append(run)
    if kind != BOUND:
        return groups
    return dict(sorted(groups.items(), key=lambda item: float(item[0])))


def median_of(runs: Sequence[Run], key: str) -> float | None:
    """Return the median of a figure over seeds; None where a run has none."""
    values = [run[key] for run in runs]
    return None if None in values else median(values)


def seeds_of(runs: Sequence[Run]) -> int:
    """Return the number of different seeds of runs."""
    return len({run["seed"] for run in runs})


def medians_table(
    head: str,
    groups: Groups,
    columns: Columns,
    *,
    seeds: int,
    beside: Mapping[str, Mapping[str, float]] | None = None,
    title: str = "",
) -> str:
    """Return a table of medians over seeds, a row for each name.

    Args:
        head: Title of the names.
        groups: The runs by name.
        columns: Columns of figures of the runs.
        seeds: Number of seeds; a name with fewer runs says so.
        beside: Further columns, by title and name.
        title: Line above the table.
    """
    beside = beside or {}
    rows = []
    for name, runs in groups.items():
        values = [(median_of(runs, key), form) for key, form in columns.values()]
        values += [(known.get(name), "{:.2f}") for known in beside.values()]
        fewer = f" ({len(runs)} seed(s))" if len(runs) < seeds else ""
        shown = ["–" if value is None else form.format(value) for value, form in values]
        rows.append([name + fewer, *shown])
    return text_table([head, *columns, *beside], rows, title)


def plot_by_bound(
    axes: Any, bounds: Groups, runs: Groups, key: str, label: str, style: str = "o-"
) -> None:
    """Plot a figure of runs by bound; bounds are evenly spaced.

    Args:
        axes: Axes of matplotlib.
        bounds: The runs whose names are the bounds of the axis.
        runs: The runs that are plotted, or predictions, by bound.
        key: Name of the figure.
        label: Label in the legend.
        style: Marker and line, as matplotlib writes them.
    """
    positions = {name: float(index) for index, name in enumerate(bounds)}
    values = {positions[name]: [run[key] for run in same] for name, same in runs.items()}
    plot_means(axes, values, label, style)
    axes.set_xticks(list(positions.values()), list(bounds))
    axes.set_xlabel("max_staleness η")


def plot_scores(axes: Any, groups: Groups, label: str) -> None:
    """Plot held-out scores over the mean seconds of each checkpoint; `label` has {} for a name."""
    for name, runs in groups.items():
        points = zip(*(run["curve"] for run in runs), strict=True)
        values = {
            fmean(second for second, _ in version): [score for _, score in version]
            for version in points
        }
        plot_means(axes, values, label.format(name), ".-")
    axes.set(xlabel="seconds of training", ylabel="greedy, held-out")
    axes.legend(fontsize=8)

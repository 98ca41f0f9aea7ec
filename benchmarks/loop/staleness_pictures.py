"""The pictures of the study of staleness, one message each; no line goes back along its axis."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.harness.record import Record
from benchmarks.loop.seed_intervals import Estimate, estimate
from benchmarks.loop.staleness_cells import (
    AUTO,
    UNBOUNDED,
    Cell,
    at_stale,
    eta,
    interpolated,
    of_bounds,
)
from deploy.report.plots import COLOURS, LINES, new_figure, save_picture

SIZE = (5.0, 3.3)
"""Inches: wider than a column of a paper, with a font to be reduced to it."""
MARKERS = "os^Dv*PX"
SPEED = "samples trained per second"
SCORE = "held-out score"
SPREAD = 0.5
"""Scores that are further below the highest one have one colour on the map."""


def plot_estimates(
    axes: Any, xs: Iterable[float], ys: Iterable[Estimate | None], **style: Any
) -> None:
    """Plot means with their intervals, where they are known."""
    points = [(x, y) for x, y in zip(xs, ys, strict=True) if y]
    if points:
        x, means = [x for x, _ in points], [y.mean for _, y in points]
        axes.errorbar(x, means, _bars(y for _, y in points), capsize=3, **style)


def _bars(values: Iterable[Estimate]) -> tuple[list[float], list[float]]:
    """Return the lengths of the lower and upper halves of intervals; 0 where none is known."""
    ends = [(v.mean, v.low, v.high) for v in values]
    return (
        [0.0 if low is None else mean - low for mean, low, _ in ends],
        [0.0 if high is None else high - mean for mean, _, high in ends],
    )


def _style(number: int) -> dict[str, str]:
    """Return colour and marker of a bound, by its place among the bounds."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[number % len(MARKERS)],
    }


def name_bounds(axes: Any, cells: Sequence[Cell]) -> None:
    """Label the horizontal axis with the bounds of cells, evenly spaced."""
    names = ["none" if cell["bound"] == UNBOUNDED else cell["bound"] for cell in cells]
    axes.set_xticks(range(len(cells)), names)
    axes.set_xlabel("η, the bound on staleness, in policy versions")


def plot_speed(axes: Any, cells: Sequence[Cell], label: str) -> None:
    """Plot throughput by bound; that of a bound set by the run is joined with no other."""
    given = [x for x, cell in enumerate(cells) if cell["bound"] != AUTO]
    own = [x for x in range(len(cells)) if x not in given]
    for xs, style in ((given, {"fmt": "o-", "label": label}), (own, {"fmt": "o"})):
        speeds = [cells[x]["samples_per_second"] for x in xs]
        plot_estimates(axes, xs, speeds, color=COLOURS[0], **style)
    axes.set(ylabel=SPEED, ylim=(0, None))
    name_bounds(axes, cells)


def plot_speed_by_lag(axes: Any, cells: Sequence[Cell]) -> None:
    """Plot throughput over mean lag: a point for each bound, which no line joins."""
    for number, cell in enumerate(cells):
        lag, speed = cell["lag_mean"], cell["samples_per_second"]
        bars = {"yerr": _bars([speed]), "xerr": _bars([lag]), "capsize": 3}
        style = {"ls": "none", "label": eta(cell["bound"]), **_style(number)}
        axes.errorbar([lag.mean], [speed.mean], **bars, **style)
    axes.set(xlabel="mean lag of trained tokens, policy versions", ylabel=SPEED, ylim=(0, None))
    axes.legend(ncols=2)


def _throughput(axes: Any, record: Record) -> None:
    cells = of_bounds(record)
    plot_speed(axes, cells, "measured")
    predicted = [(x, cell["simulated"].mean) for x, cell in enumerate(cells) if cell["simulated"]]
    if predicted:
        axes.plot(*zip(*predicted, strict=True), ":", color=COLOURS[1], label="predicted")
    for position, cell in enumerate(cells):
        place = {"ha": "center", "va": "bottom", "rotation": "vertical"}
        axes.text(position, 0, f" {cell['limit']}", size=7, **place)
    axes.set_xlim(-0.6, len(cells) - 0.4)
    axes.legend(title="limited by what stands below", loc="center", bbox_to_anchor=(0.6, 0.4))


def _lags(axes: Any, record: Record) -> None:
    cells = of_bounds(record)
    xs = range(len(cells))
    low, high = ([cell[f"lag_p{end}"].mean for cell in cells] for end in (5, 95))
    axes.vlines(xs, low, high, color=COLOURS[5], lw=9, label="5 to 95 % of tokens")
    means = [cell["lag_mean"] for cell in cells]
    plot_estimates(axes, xs, means, label="mean", fmt="o", color=COLOURS[7], ms=5)
    bounds = {x: int(cell["bound"]) for x, cell in enumerate(cells) if cell["bound"].isdecimal()}
    marks = {"color": COLOURS[1], "ms": 18, "mew": 2, "label": "η"}
    axes.plot([*bounds], [*bounds.values()], "_", **marks)
    axes.set(ylabel="lag of trained tokens, policy versions", ylim=(0, None))
    name_bounds(axes, cells)
    axes.legend(loc="upper left")


def _curves(axes: Any, record: Record, *, over_seconds: bool) -> None:
    for number, cell in enumerate(of_bounds(record)):
        key = (cell["bound"], cell["correction"])
        runs = [run for run in record["arms"] if (run["name"], run["kind"]) == key]
        times = [fmean(second for second, _ in point) for point in _points(runs)]
        scores = (
            [[interpolated(run["curve"], time) for run in runs] for time in times]
            if over_seconds
            else [[score for _, score in point] for point in _points(runs)]
        )
        xs = times if over_seconds else runs[0]["versions"]
        values = [value for of_seeds in scores if (value := estimate(of_seeds))]
        style = {"ls": LINES[number % len(LINES)], "ms": 4, **_style(number)}
        axes.plot(xs, [value.mean for value in values], label=eta(cell["bound"]), **style)
        if all(value.low is not None for value in values):
            ends = ([value[end] for value in values] for end in (1, 2))
            axes.fill_between(xs, *ends, color=style["color"], alpha=0.12, lw=0)
    axes.set(xlabel="seconds of training" if over_seconds else "batches trained", ylabel=SCORE)
    axes.legend(ncols=2)


def _points(runs: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the (seconds, score) of all runs at each of their checkpoints."""
    return [*zip(*(run["curve"] for run in runs), strict=True)]


def _corrections(axes: Any, record: Record) -> None:
    cells = at_stale(record)
    for offset, key, label, style in (
        (-0.12, "score", f"after {record['steps']} batches", {"fmt": "o", "color": COLOURS[0]}),
        (
            0.12,
            "score_in_time",
            f"after {record['equal_seconds']:.0f} s",
            {"fmt": "s", "color": COLOURS[1]},
        ),
    ):
        values = [cell[f"{key}_less_synchronous"] for cell in cells]
        xs = [x + offset for x in range(len(cells))]
        plot_estimates(axes, xs, values, label=label, **style)
    axes.axhline(0, color="0.5", lw=1)
    axes.set_xticks(range(len(cells)), [cell["correction"] for cell in cells], size=8)
    axes.set(xlabel=f"correction at η = {record['stale']}", ylabel=f"{SCORE} less that of η = 0")
    axes.legend()


def _map(axes: Any, record: Record) -> None:
    cells = {(cell["correction"], cell["bound"]): cell for cell in record["cells"]}
    rows, columns = ([*dict.fromkeys(key[part] for key in cells)] for part in (0, 1))
    scores = {key: cell["score"].mean for key, cell in cells.items()}
    shown = [[scores.get((row, column), float("nan")) for column in columns] for row in rows]
    highest = max(scores.values())
    lowest = max(min(scores.values()), highest - SPREAD)
    image = axes.imshow(shown, cmap="cividis", aspect="auto", vmin=lowest, vmax=highest)
    middle = fmean(image.get_clim())
    for (row, column), score in scores.items():
        at = (columns.index(column), rows.index(row))
        colour = "black" if score > middle else "white"
        mark = "*" if cells[row, column]["score"].low is None else ""
        axes.text(*at, f"{score:.2f}{mark}", ha="center", va="center", color=colour, size=8)
    name_bounds(axes, [{"bound": column} for column in columns])
    axes.set_yticks(range(len(rows)), rows, size=8)
    axes.grid(visible=False)
    axes.figure.colorbar(image, label=f"{SCORE} (*: of one seed)")


def pictures(record: Record) -> dict[str, Callable[[Any, Record], None]]:
    """Return what draws the pictures of a record with its conclusions, by name."""
    shown: dict[str, Callable[[Any, Record], None]] = {
        "throughput": _throughput,
        "throughput_by_lag": lambda axes, record: plot_speed_by_lag(axes, of_bounds(record)),
        "lag": _lags,
        "score_by_batches": partial(_curves, over_seconds=False),
        "score_by_seconds": partial(_curves, over_seconds=True),
    }
    if any(cell["score_less_synchronous"] for cell in at_stale(record)):
        shown["corrections"] = _corrections
    if len({cell["bound"] for cell in record["cells"] if cell["correction"] != record["own"]}) > 1:
        shown["map"] = _map
    return shown


def draw(record: Record, folder: Path) -> None:
    """Write every picture as PNG and SVG."""
    import matplotlib as mpl

    with mpl.rc_context({"font.size": 9, "legend.fontsize": 8, "svg.hashsalt": "headway"}):
        for name, draw_into in pictures(record).items():
            figure = new_figure(*SIZE)
            axes = figure.subplots()
            axes.grid(visible=True, alpha=0.25, lw=0.6)
            axes.spines[["top", "right"]].set_visible(False)
            draw_into(axes, record)
            save_picture(figure, folder / f"staleness_{name}")

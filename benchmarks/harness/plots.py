"""Plots of benchmarks: figures over a variable, and throughput over measured off-policyness."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import Any

Run = Mapping[str, Any]
"""Figures of one run, with its name, seed and kind."""


@dataclass(frozen=True, slots=True)
class OffPolicyness:
    """A measure of how far trained tokens were from the policy that trained them."""

    label: str
    of: Callable[[Run], float | None]
    """Returns the value for the figures of a run; None where they lack it."""


MEASURES = (
    OffPolicyness("mean lag of trained tokens, versions", lambda run: run["lag_mean"]),
    OffPolicyness("1 − effective sample size", lambda run: 1 - run["ess"]),
    OffPolicyness("KL to the policy that sampled, nats a token", lambda run: run.get("kl")),
)
BESIDE = (((5, -11), "left"), ((5, 5), "left"), ((-5, 5), "right"), ((-5, -11), "right"))
"""Offsets of the names of points that follow one another, in points, and their alignment."""
LEAST_SHOWN = 1e-6
"""A measure that is nowhere larger is the rounding of on-policy training."""


def plot_means(
    axes: Any, values: Mapping[float, Sequence[float]], label: str, style: str = "o-"
) -> None:
    """Plot means over a variable; where one has several values, each is a dot.

    Args:
        axes: Of matplotlib.
        values: The values by position on the horizontal axis.
        label: In the legend.
        style: Marker and line, as matplotlib writes them.
    """
    positions = sorted(values)
    means = [fmean(values[position]) for position in positions]
    (line,) = axes.plot(positions, means, style, label=label)
    if any(len(same) > 1 for same in values.values()):
        points = [(position, value) for position in positions for value in values[position]]
        _dots(axes, points, line.get_color())


def _dots(axes: Any, points: Sequence[tuple[float, float]], color: Any) -> None:
    axes.plot(*zip(*points, strict=True), ".", color=color, alpha=0.5, ms=4)


def tradeoffs(runs: Mapping[str, Sequence[Run]]) -> list[OffPolicyness]:
    """Return the measures that differ between bounds and that every run has.

    Args:
        runs: Figures of the runs of each bound, one for each seed or round.
    """
    shown = []
    for measure in MEASURES:
        values = [measure.of(run) for same in runs.values() for run in same]
        known = [value for value in values if value is not None]
        if len(runs) > 1 and len(known) == len(values) and max(known) > LEAST_SHOWN:
            shown.append(measure)
    return shown


def plot_tradeoff(axes: Any, runs: Mapping[str, Sequence[Run]], measure: OffPolicyness) -> None:
    """Plot throughput over a measure, with a point and its η for each bound.

    Points are means; where a bound has several runs, each is a dot.

    Args:
        axes: Of matplotlib.
        runs: Figures of the runs of each bound, smallest bound first.
        measure: One of `tradeoffs`.
    """
    points = [
        [(measure.of(run) or 0.0, run["samples_per_second"]) for run in same]
        for same in runs.values()
    ]
    means = [(fmean(x for x, _ in same), fmean(y for _, y in same)) for same in points]
    (line,) = axes.plot(*zip(*means, strict=True), "o-", alpha=0.6)
    if any(len(same) > 1 for same in points):
        _dots(axes, [point for same in points for point in same], line.get_color())
    for name, mean, (offset, side) in zip(runs, means, cycle(BESIDE)):
        shown = "no bound" if name == "inf" else f"η = {name}"
        axes.annotate(shown, mean, offset, textcoords="offset points", fontsize=8, ha=side)
    axes.margins(x=0.15, y=0.12)
    axes.set(
        title=f"Throughput by {measure.label.partition(',')[0]}",
        xlabel=measure.label,
        ylabel="samples trained per second",
        ylim=(0, None),
    )
    axes.locator_params(axis="x", nbins=5)
    axes.ticklabel_format(axis="x", scilimits=(-2, 4))


def save_picture(figure: Any, path: Path) -> None:
    """Write a figure of matplotlib as `path` with the suffixes .png and .svg."""
    figure.savefig(path.with_suffix(".png"), dpi=100)
    figure.savefig(path.with_suffix(".svg"))

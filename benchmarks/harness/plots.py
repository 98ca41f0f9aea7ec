"""Plots of benchmarks: figures over a variable, and throughput over measured off-policyness."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.harness.intervals import CONFIDENCE, interval

Run = Mapping[str, Any]


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
INTERVAL = f"{CONFIDENCE:.0%} interval of the mean"
BESIDE = (((5, -11), "left"), ((5, 5), "left"), ((-5, 5), "right"), ((-5, -11), "right"))
"""Offsets of the names of points that follow one another, in points, and their alignment."""
LEAST_SHOWN = 1e-6
"""A measure that is nowhere larger is the rounding of on-policy training."""


def plot_means(
    axes: Any, values: Mapping[float, Sequence[float]], label: str, style: str = "o-"
) -> None:
    """Plot means over a variable; where one has several values, dots and a band of their interval.

    The axes are as large as the values need: the interval of few may reach beyond them.

    Args:
        axes: Of matplotlib.
        values: The values by position on the horizontal axis.
        label: In the legend.
        style: Marker and line, as matplotlib writes them.
    """
    positions = sorted(values)
    means = [fmean(values[position]) for position in positions]
    (line,) = axes.plot(positions, means, style, label=label)
    ends = np.array([_interval(values[position]) for position in positions])
    if all(len(same) == 1 for same in values.values()):
        return
    points = [(position, value) for position in positions for value in values[position]]
    axes.plot(*zip(*points, strict=True), ".", color=line.get_color(), alpha=0.5, ms=4)
    limits = axes.dataLim.frozen()
    axes.fill_between(positions, ends[:, 0], ends[:, 1], color=line.get_color(), alpha=0.2, lw=0)
    axes.dataLim.set(limits)


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the interval of the mean; of a single value, that value twice."""
    return interval(values) if len(values) > 1 else (values[0], values[0])


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

    Points are means; where a bound has several runs, dots show each and bars their intervals, which
    may reach beyond the axes.

    Args:
        axes: Of matplotlib.
        runs: Figures of the runs of each bound, smallest bound first.
        measure: One of `tradeoffs`.
    """
    across = [[measure.of(run) or 0.0 for run in same] for same in runs.values()]
    upward = [[run["samples_per_second"] for run in same] for same in runs.values()]
    x, y = [fmean(values) for values in across], [fmean(values) for values in upward]
    axes.plot(x, y, "o-", color="tab:blue", alpha=0.6)
    if any(len(same) > 1 for same in runs.values()):
        axes.plot(np.concatenate(across), np.concatenate(upward), ".", color="tab:blue", ms=4)
        limits = axes.dataLim.frozen()
        bars = {"xerr": _beside(x, across), "yerr": _beside(y, upward)}
        style = {"fmt": "none", "ecolor": "tab:blue", "capsize": 3, "lw": 1}
        axes.errorbar(x, y, label=INTERVAL, **style, **bars)
        axes.dataLim.set(limits)
        axes.legend(fontsize=8, loc="lower right")
    for name, point, (offset, side) in zip(runs, zip(x, y, strict=True), cycle(BESIDE)):
        shown = "no bound" if name == "inf" else f"η = {name}"
        axes.annotate(shown, point, offset, textcoords="offset points", fontsize=8, ha=side)
    axes.margins(x=0.15, y=0.12)
    axes.set(
        title=f"Throughput by {measure.label.partition(',')[0]}",
        xlabel=measure.label,
        ylabel="samples trained per second",
        ylim=(0, None),
    )
    axes.locator_params(axis="x", nbins=5)
    axes.ticklabel_format(axis="x", scilimits=(-2, 4))


def _beside(means: Sequence[float], values: Sequence[Sequence[float]]) -> Any:
    """Return how far the ends of the interval are from each mean: [2, points]."""
    ends = np.array([_interval(same) for same in values])
    return np.array([means - ends[:, 0], ends[:, 1] - means])


def save_picture(figure: Any, path: Path) -> None:
    """Write a figure of matplotlib as `path` with the suffixes .png and .svg."""
    figure.savefig(path.with_suffix(".png"), dpi=100)
    figure.savefig(path.with_suffix(".svg"))

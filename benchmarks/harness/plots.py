"""Plots of benchmarks: figures over a variable, and throughput over measured off-policyness."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

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
LEAST_SHOWN = 1e-6
"""A measure that is nowhere larger is the rounding of on-policy training."""


def plot_medians(
    axes: Any, values: Mapping[float, Sequence[float]], label: str, style: str = "o-"
) -> None:
    """Plot medians over a variable; a band spans the smallest and the largest value.

    Args:
        axes: Of matplotlib.
        values: The values by position on the horizontal axis.
        label: In the legend.
        style: Marker and line, as matplotlib writes them.
    """
    positions = sorted(values)
    medians = [float(np.median(values[position])) for position in positions]
    (line,) = axes.plot(positions, medians, style, label=label)
    least = [min(values[position]) for position in positions]
    most = [max(values[position]) for position in positions]
    axes.fill_between(positions, least, most, color=line.get_color(), alpha=0.2, lw=0)


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

    Points are medians; where a bound has several runs, bars span the smallest and largest value.

    Args:
        axes: Of matplotlib.
        runs: Figures of the runs of each bound, smallest bound first.
        measure: One of `tradeoffs`.
    """
    across = [[measure.of(run) or 0.0 for run in same] for same in runs.values()]
    upward = [[run["samples_per_second"] for run in same] for same in runs.values()]
    x = [float(np.median(values)) for values in across]
    y = [float(np.median(values)) for values in upward]
    axes.plot(x, y, "o-", color="tab:blue", alpha=0.6)
    if any(len(same) > 1 for same in runs.values()):
        bars = {"xerr": _beside(x, across), "yerr": _beside(y, upward)}
        label = "smallest and largest"
        axes.errorbar(x, y, fmt="none", ecolor="tab:blue", capsize=3, lw=1, label=label, **bars)
        axes.legend(fontsize=8, loc="lower right")
    for name, point in zip(runs, zip(x, y, strict=True), strict=True):
        shown = "no bound" if name == "inf" else f"η = {name}"
        axes.annotate(shown, point, (5, -11), textcoords="offset points", fontsize=8)
    axes.set(
        title=f"Throughput by {measure.label.partition(',')[0]}",
        xlabel=measure.label,
        ylabel="samples trained per second",
        ylim=(0, None),
    )
    axes.margins(x=0.12)
    axes.locator_params(axis="x", nbins=5)
    axes.ticklabel_format(axis="x", scilimits=(-2, 4))


def _beside(medians: Sequence[float], values: Sequence[Sequence[float]]) -> Any:
    """Return how far the smallest and the largest value are from each median: [2, points]."""
    least, most = [min(same) for same in values], [max(same) for same in values]
    return np.array([np.subtract(medians, least), np.subtract(most, medians)])


def save_picture(figure: Any, path: Path) -> None:
    """Write a figure of matplotlib as `path` with the suffixes .png and .svg."""
    figure.savefig(path.with_suffix(".png"), dpi=100)
    figure.savefig(path.with_suffix(".svg"))

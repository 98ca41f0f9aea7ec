"""Line plots of a figure over a variable, with intervals."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


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

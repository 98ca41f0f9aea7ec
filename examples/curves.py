"""Draw the held-out scores of runs as one small picture: `python curves.py FILE.svg SUMMARY...`.

Curves are named by seed where the runs are `NAME-SEED`, as those of `make demo`, else by run.
`--minutes` before the file draws sampled scores alone, with 95 % intervals (graded scores:
the widest that they can have), over time.
"""

import json
import sys
from itertools import cycle
from math import sqrt
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

GREY, COLOURS = "#6e7781", ("#0969da", "#bf3989", "#1a7f37", "#bc4c00", "#8250df")


def named(run: str) -> str:
    """Return the seed of a run that is named `NAME-SEED`, else its name."""
    seed = run.rpartition("-")[2]
    return f"seed {seed}" if seed.isdecimal() else run


def draw(picture: Path, summaries: list[Path], *, minutes: bool) -> None:
    """Write an SVG of greedy (solid) and sampled (dashed) scores over batches, or over minutes."""
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "headway", "font.size": 9})
    figure = Figure(figsize=(5.6, 2.6), layout="constrained", facecolor="white")
    axes = figure.subplots()
    for path, colour in zip(summaries, cycle(COLOURS), strict=False):
        summary = json.loads(path.read_text())
        name: str | None = named(summary["name"])
        for key, style in (("heldout", "o-"), ("heldout_sampled", ".--")):
            rows = summary.get(key, [])
            scores = [row["score"] for row in rows]
            if minutes and key == "heldout_sampled":
                times = [row["seconds"] / 60 for row in rows]
                bars = [
                    1.96 * sqrt(row["score"] * (1 - row["score"]) / row["size"]) for row in rows
                ]
                axes.errorbar(times, scores, bars, fmt=".-", color=colour, label=name, capsize=2)
            elif rows and not minutes:
                versions = [row["version"] for row in rows]
                axes.plot(versions, scores, style, color=colour, label=name, ms=4)
                name = None  # its other curve has the same colour
    across = "minutes" if minutes else "batches trained"
    axes.set(xlabel=across, ylabel="held-out score", ylim=(0, 1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, color=GREY)
    title = None if minutes else "solid: greedy, dashed: sampled"
    axes.legend(frameon=False, loc="lower right", ncols=1 + (len(summaries) > 2), title=title)
    figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    files = [Path(argument) for argument in sys.argv[1:] if argument != "--minutes"]
    draw(files[0], files[1:], minutes="--minutes" in sys.argv)

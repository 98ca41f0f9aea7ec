"""Draw the held-out scores of runs as one small picture: `python curves.py FILE.svg SUMMARY...`.

Curves are named by seed where the runs are `NAME-SEED`, as those of `make demo`, else by run.
"""

import json
import sys
from itertools import cycle
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

GREY, COLOURS = "#6e7781", ("#0969da", "#bf3989", "#1a7f37", "#bc4c00", "#8250df")


def named(run: str) -> str:
    """Return the seed of a run that is named `NAME-SEED`, else its name."""
    seed = run.rpartition("-")[2]
    return f"seed {seed}" if seed.isdecimal() else run


def draw(picture: Path, summaries: list[Path]) -> None:
    """Write an SVG of greedy (solid) and sampled (dashed) scores over batches."""
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "headway", "font.size": 9})
    figure = Figure(figsize=(5.6, 2.6), layout="constrained", facecolor="white")
    axes = figure.subplots()
    for path, colour in zip(summaries, cycle(COLOURS), strict=False):
        summary = json.loads(path.read_text())
        name: str | None = named(summary["name"])
        for key, style in (("heldout", "o-"), ("heldout_sampled", ".--")):
            if rows := summary.get(key, []):
                versions = [row["version"] for row in rows]
                scores = [row["score"] for row in rows]
                axes.plot(versions, scores, style, color=colour, label=name, ms=4)
                name = None  # its other curve has the same colour
    axes.set(xlabel="batches trained", ylabel="held-out score", ylim=(0, 1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, color=GREY)
    title = "solid: greedy, dashed: sampled"
    axes.legend(frameon=False, loc="lower right", ncols=1 + (len(summaries) > 2), title=title)
    figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    picture, *summaries = map(Path, sys.argv[1:])
    draw(picture, summaries)

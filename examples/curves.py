"""Draw the held-out scores of runs as one small picture: `python curves.py FILE.svg SUMMARY...`.

Curves are named by seed where the runs are `NAME-SEED`, as those of `make demo`, else by run.
"""

import json
import sys
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

GREY, COLOURS = "#6e7781", ("#0969da", "#bf3989", "#1a7f37")


def named(run: str) -> str:
    """Return the seed of a run that is named `NAME-SEED`, else its name."""
    seed = run.rpartition("-")[2]
    return f"seed {seed}" if seed.isdecimal() else run


def draw(picture: Path, summaries: list[Path]) -> None:
    """Write an SVG of greedy (solid) and sampled (dashed) scores over the trained batches."""
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "headway", "font.size": 9})
    figure = Figure(figsize=(5.6, 2.6), layout="constrained", facecolor="white")
    axes = figure.subplots()
    for path, colour in zip(summaries, COLOURS, strict=False):
        summary = json.loads(path.read_text())
        for key, style in (("heldout", "o-"), ("heldout_sampled", ".--")):
            scores = [(score["version"], score["score"]) for score in summary.get(key, [])]
            if scores:
                label = f"{named(summary['name'])}, {'greedy' if key == 'heldout' else 'sampled'}"
                axes.plot(*zip(*scores, strict=True), style, color=colour, label=label, ms=4)
    axes.set(xlabel="batches trained", ylabel="held-out score", ylim=(0, 1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, color=GREY)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    draw(Path(sys.argv[1]), [Path(argument) for argument in sys.argv[2:]])

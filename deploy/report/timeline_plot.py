"""Plot of a timeline: an axis for each actor, the queue, the learner and each engine's updates."""

from typing import TYPE_CHECKING

from deploy.report.timeline import Curve, Span, Timeline

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

COLOURS = {
    "wait": "0.85",
    "step": "tab:blue",
    "publish": "tab:orange",
    "ack": "tab:green",
    "checkpoint": "tab:purple",
    "staging": "tab:olive",
    "prepare": "tab:pink",
    "permit": "0.7",
    "pause": "tab:red",
    "failed": "black",
}
ROW_INCHES = 0.75


def height(timeline: Timeline) -> float:
    """Return the height in inches that a timeline needs."""
    return 1.2 + ROW_INCHES * (2 + len(timeline.actors) + len(timeline.updates))


def draw_timeline(figure: "Figure | SubFigure", timeline: Timeline, title: str) -> None:
    """Fill a figure with the axes of a timeline over a common time in seconds."""
    rows = 2 + len(timeline.actors) + len(timeline.updates)
    axes = figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]
    begin, end = timeline.begin, timeline.end
    left = iter(axes)
    for engine, curve in timeline.actors.items():
        _curve(next(left), curve, begin, f"{engine}\nrollouts", "tab:cyan")
    queue = next(left)
    _curve(queue, timeline.queue, begin, "queue\nready groups", "tab:brown")
    queue.axhline(timeline.groups_per_batch, color="0.4", lw=0.8, ls=":")
    _spans(next(left), timeline.learner, begin, "learner")
    for engine, spans in timeline.updates.items():
        _spans(next(left), spans, begin, f"{engine}\nupdates")
    for axis in axes:
        for number, span in enumerate(s for s in timeline.learner if s.kind == "step"):
            axis.axvline(span.start - begin, color="0.6", lw=0.5, ls="--")
            if axis is axes[0]:
                axis.annotate(
                    f"v{timeline.first + number}",
                    (span.start - begin, 1.02),
                    xycoords=("data", "axes fraction"),
                    fontsize=8,
                )
    axes[-1].set(xlabel="seconds", xlim=(0, end - begin))
    figure.suptitle(title, fontsize=11)


def _curve(axes: "Axes", curve: Curve, begin: float, label: str, colour: str) -> None:
    times, counts = [time - begin for time, _ in curve], [count for _, count in curve]
    axes.fill_between(times, counts, step="post", color=colour, alpha=0.6, lw=0)
    axes.set_ylabel(label, rotation=0, ha="right", va="center")
    axes.set_ylim(0, None)


def _spans(axes: "Axes", spans: "Sequence[Span]", begin: float, label: str) -> None:
    for kind in dict.fromkeys(span.kind for span in spans):
        bars = [(s.start - begin, s.end - s.start) for s in spans if s.kind == kind]
        axes.broken_barh(bars, (0, 1), color=COLOURS[kind], lw=0, label=kind)
    axes.set_yticks([])
    axes.set_ylim(0, 1)
    axes.set_ylabel(label, rotation=0, ha="right", va="center")
    if spans:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=7, frameon=False)

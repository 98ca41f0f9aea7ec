"""The run as one picture: reward, throughput, lag, and a timeline of its first updates."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.summary import Record, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TIMELINE_STEPS = 10


def draw(record: Record, file: Path) -> None:
    """Writes the picture of a run; nothing for a run that trained no batch.

    Args:
        record: What was gathered.
        file: A PNG file, replaced if it exists.
    """
    if not record.batches:
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{record.name}: {record.version} of {record.steps} steps")
    (reward, speed), (lag, timeline) = figure.subplots(2, 2)
    _reward(reward, record)
    _throughput(speed, record.batches)
    _lag(lag, record.batches)
    _timeline(timeline, record.batches[1 : TIMELINE_STEPS + 1], record.swaps)
    figure.savefig(file, dpi=110)


def _reward(axes: "Axes", record: Record) -> None:
    versions = [row["version"] for row in record.batches]
    axes.plot(versions, [row["reward_mean"] for row in record.batches], lw=1, label="training")
    for series, label in (
        (record.heldout, "held-out, greedy"),
        (record.heldout_sampled, "sampled"),
    ):
        if series:
            axes.plot(
                [r["version"] for r in series], [r["score"] for r in series], "o-", label=label
            )
    axes.set(title="Reward", xlabel="policy version")
    axes.legend(loc="lower right")


def _throughput(axes: "Axes", batches: Sequence[Row]) -> None:
    start = batches[0]["step_finished_at"]
    ends = [row["step_finished_at"] - start for row in batches]
    rates = [
        row["rollouts_trained"] / (end - before)
        for row, before, end in zip(batches[1:], ends, ends[1:], strict=False)
    ]
    axes.plot(ends[1:], rates, lw=1)
    axes.set(
        title="Throughput",
        xlabel="seconds since the first step",
        ylabel="rollouts trained per second",
        ylim=(0, None),
    )


def _lag(axes: "Axes", batches: Sequence[Row]) -> None:
    counts: dict[int, int] = {}
    for row in batches:
        for lag, tokens in row["lag_histogram"].items():
            counts[int(lag)] = counts.get(int(lag), 0) + tokens
    total = sum(counts.values())
    lags = sorted(counts)
    axes.bar([str(lag) for lag in lags], [counts[lag] / total for lag in lags])
    axes.set(title="Lag of trained tokens", xlabel="policy versions", ylabel="share of tokens")


def _timeline(axes: "Axes", batches: Sequence[Row], swaps: Sequence[Row]) -> None:
    """When the learner trained, when each version was published, when an engine served it."""
    if not batches:
        axes.set_axis_off()
        return
    begin, end = batches[0]["step_started_at"], batches[-1]["published_at"]
    for row in batches:
        seconds = row["step_finished_at"] - row["step_started_at"]
        left = row["step_started_at"] - begin
        axes.barh(0, seconds, left=left, color="tab:blue", edgecolor="white")
    engines = sorted({swap["engine_id"] for swap in swaps})
    for place, engine in enumerate(engines, 1):
        for swap in swaps:
            if swap["engine_id"] != engine or swap["swap_finished_at"] is None:
                continue
            if begin <= swap["published_at"] <= end:
                left = swap["published_at"] - begin
                axes.barh(
                    place, swap["swap_finished_at"] - swap["published_at"], left=left, color="0.8"
                )
                pause = swap["swap_finished_at"] - swap["swap_started_at"]
                axes.barh(place, pause, left=swap["swap_started_at"] - begin, color="tab:red")
    axes.set_yticks(range(len(engines) + 1), ["learner", *engines])
    axes.set(
        title="First steps: training, and each version on its way (pause in red)",
        xlabel="seconds",
    )

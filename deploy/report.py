"""The run as one picture: reward, throughput, lag, and a timeline of some steps."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.errors import InputError
from deploy.run_directory import RunDirectory
from deploy.summary import Record, Row
from deploy.timeline import read_timeline
from deploy.timeline_picture import draw_timeline, height

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def report(directory: RunDirectory) -> Path:
    """Draws the picture of a run anew from its folder alone; the run may be going on, or dead.

    Returns:
        The picture.

    Raises:
        InputError: It trained no batch yet.
        QueuesError: The ledger or the journal cannot be read.
    """
    record = read_record(directory)
    if not record.batches:
        raise InputError(f"{directory.path} has trained no batch yet, so there is nothing to draw")
    draw(record, directory)
    return directory.picture


def read_record(directory: RunDirectory) -> Record:
    """What a picture shows of a run, as its driver wrote it down."""
    config = directory.config()
    record = Record(config.name, config.steps, config.queues.max_staleness, started_at=0.0)
    rows = {row["version"]: row for row in directory.rows("metrics.jsonl")}
    record.batches = [rows[version] for version in sorted(rows)]
    record.swaps = directory.rows("swaps.jsonl")
    if directory.summary_file.exists():
        summary = json.loads(directory.summary_file.read_text())
        record.heldout, record.heldout_sampled = summary["heldout"], summary["heldout_sampled"]
    return record


def draw(record: Record, directory: RunDirectory) -> None:
    """Writes the picture of a run; nothing for a run that trained no batch.

    Args:
        record: What was gathered.
        directory: The run; its ledger and journal are read for the timeline.
    """
    if not record.batches:
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    timeline = read_timeline(
        directory.path,
        record.batches,
        record.swaps,
        max_staleness=record.max_staleness,
        groups_per_batch=directory.config().prompts.groups_per_batch,
    )
    assert timeline is not None
    heights = [4.0, height(timeline)]
    figure = Figure(figsize=(13, sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{record.name}: {record.version} of {record.steps} steps")
    above, below = figure.subfigures(2, 1, height_ratios=heights, squeeze=False)[:, 0]
    reward, speed, lag = above.subplots(1, 3)
    _reward(reward, record)
    _throughput(speed, record.batches)
    _lag(lag, record.batches)
    steps = sum(span.kind == "step" for span in timeline.learner)
    draw_timeline(below, timeline, f"{steps} steps from version {timeline.first} on")
    figure.savefig(directory.picture, dpi=110)


def _reward(axes: "Axes", record: Record) -> None:
    versions = [row["version"] for row in record.batches]
    axes.plot(versions, [row["reward_mean"] for row in record.batches], lw=1, label="training")
    sampled = record.heldout_sampled
    best = [row for row in sampled if "pass_at_k" in row]
    for series, key, label in (
        (record.heldout, "score", "held-out, greedy"),
        (sampled, "score", "sampled"),
        (best, "pass_at_k", f"pass@{best[-1]['samples']}" if best else ""),
    ):
        if series:
            axes.plot([r["version"] for r in series], [r[key] for r in series], "o-", label=label)
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

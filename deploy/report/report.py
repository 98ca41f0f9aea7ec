"""The report of a run, or of several side by side, drawn from their folders as one page."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.errors import InputError
from deploy.report.html import page
from deploy.report.plots import COLOURS, PlottedRun, new_figure
from deploy.report.summary import summarise
from deploy.report.tables import figures
from deploy.report.timeline import draw_timeline, height, read_timeline
from deploy.storage.run_directory import RunDirectory
from deploy.storage.run_record import Record
from learner.diagnostics.batch_report import TrainedBatch
from queues.readers.accounting import open_ledger
from queues.readers.selection_bias import report_bias
from queues.runtime.atomic_file import atomic_file
from weight_sync.announcements import WeightUpdateReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST = len(COLOURS)
"""Most runs on a page."""


def report(directory: RunDirectory, others: Sequence[RunDirectory] = ()) -> Path:
    """Draw the page of a run, or a page that compares it with others.

    Returns:
        The page in the folder of the run: `report.html`, or `compare.html`.

    Raises:
        InputError: A run has trained no batch yet, or there are more than MOST.
        QueuesError: A ledger or a journal cannot be read.
    """
    directories = [directory, *others]
    if len(directories) > MOST:
        raise InputError(f"{len(directories)} runs are too many for one page; compare up to {MOST}")
    records = []
    for run in directories:
        recorded = run.ledger.exists() and (run.path / "metrics.jsonl").exists()
        record = read_record(run) if recorded else None
        if record is None or not record.batches:
            raise InputError(f"{run.path} has trained no batch yet, so there is nothing to draw")
        records.append(record)
    file = directory.path / "compare.html" if others else directory.page
    with atomic_file(file) as opened:
        opened.write(_page(records, directories).encode())
    return file


def read_record(directory: RunDirectory) -> Record:
    """Read the part of a run's record that its page shows."""
    config = directory.config()
    record = Record(config.name, config.steps, config.queues.max_staleness, started_at=0.0)
    record.batches = read_batches(directory)
    record.swaps = [WeightUpdateReport(**row) for row in directory.rows("swaps.jsonl")]
    if directory.summary_file.exists():
        summary = json.loads(directory.summary_file.read_text())
        record.heldout, record.heldout_sampled = summary["heldout"], summary["heldout_sampled"]
    return record


def read_batches(directory: RunDirectory) -> list[TrainedBatch]:
    """Return the trained batches of a run in order; of one trained again, the newest record."""
    rows = {row["version"]: row for row in directory.rows("metrics.jsonl")}
    return [TrainedBatch.from_dict(rows[version]) for version in sorted(rows)]


def draw(record: Record, directory: RunDirectory) -> None:
    """Write the page of a run, unless it has trained no batch."""
    if record.batches:
        with atomic_file(directory.page) as file:
            file.write(_page([record], [directory]).encode())


def _page(records: Sequence[Record], directories: Sequence[RunDirectory]) -> str:
    labels, runs = _labels(directories), []
    for label, record, directory, colour in zip(
        labels, records, directories, COLOURS, strict=False
    ):
        with open_ledger(directory.path) as database:
            bias = report_bias(database)
        runs.append(PlottedRun(label, record, bias, colour, _figures(record, directory)))
    first = records[0]
    if len(runs) > 1:
        return page(" · ".join(labels), runs, None)
    title = f"{first.name}: {first.version} of {first.steps} steps"
    return page(title, runs, _timeline(first, directories[0]))


def _figures(record: Record, directory: RunDirectory) -> dict[str, str]:
    """Return the figures of the written summary, or of the batches where there is none yet."""
    status = directory.status() or "unknown"
    if directory.summary_file.exists():
        summary: dict[str, Any] = json.loads(directory.summary_file.read_text())
    else:
        summary = summarise(record, status=status, now=time.time()) | {"seconds": None}
    return {"status": status, **figures(summary)}


def _timeline(record: Record, directory: RunDirectory) -> "tuple[str, Figure]":
    timeline = read_timeline(directory, record)
    figure = new_figure(13, height(timeline))
    draw_timeline(figure, timeline, "")
    steps = sum(span.kind == "step" for span in timeline.learner)
    return f"Timeline: {steps} steps from version {timeline.first} on", figure


def _labels(directories: Sequence[RunDirectory]) -> list[str]:
    """Return the names of the folders, with the parent folder where two are alike."""
    names = [directory.path.name for directory in directories]
    return [
        name if names.count(name) == 1 else f"{directory.path.parent.name}/{name}"
        for name, directory in zip(names, directories, strict=True)
    ]

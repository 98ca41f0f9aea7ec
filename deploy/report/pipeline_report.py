"""The report of a pipeline, one page over all of its stages, and the table that it ends with."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from deploy.config.changes import differing
from deploy.config.pipeline import Pipeline
from deploy.report.plots import COLOURS, SIZE, new_figure
from deploy.report.report import Page
from deploy.storage.stage_records import DoneStage
from headway.atomic_file import atomic_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE = "pipeline.html"
Scores = Mapping[str, Mapping[str, Any]]
"""By the name of a score: its value, its 95 % interval and the number of problems."""


def scores_of(record: DoneStage) -> Scores:
    """Return the scores of a stage, by held-out set and name."""
    sets = record.scores["sets"] if record.scores else {}
    return {
        f"{name}, {label.replace('_', ' ')}": score
        for name, scores in sets.items()
        for label, score in scores.items()
    }


def rows_of(done: Mapping[str, DoneStage]) -> dict[str, list[str]]:
    """Return the rows of the table of stages: command, minutes and scores, a cell for each."""
    scores = [scores_of(record) for record in done.values()]
    rows = {
        "command": [record.command for record in done.values()],
        "minutes": [f"{record.seconds / 60:.1f}" for record in done.values()],
    }
    for name in dict.fromkeys(name for of_stage in scores for name in of_stage):
        rows[name] = [_score_text(of_stage.get(name)) for of_stage in scores]
    return rows


def _score_text(score: Mapping[str, Any] | None) -> str:
    if score is None:
        return "–"
    if score["low"] is None:
        return f"{score['value']:.3f}"
    return f"{score['value']:.3f} ({score['low']:.3f} to {score['high']:.3f})"


def show_pipeline(title: str, done: Mapping[str, DoneStage], console: Console) -> None:
    """Print the stages, a column for each."""
    table = Table("", *done, title=title)
    for name, cells in rows_of(done).items():
        table.add_row(name, *cells)
    console.print(table)


def pipeline_report(pipeline: Pipeline, done: Mapping[str, DoneStage]) -> Path:
    """Draw the page of the stages that are done in the pipeline's folder; return its path."""
    names = [
        f"{stage.name}: its own page is {stage.run_folder.name}/report.html"
        for stage in pipeline.stages
        if stage.name in done and stage.command == "run"
    ]
    tables = [("", rows_of(done))]
    if recipes := differing([{**record.settings, "name": None} for record in done.values()]):
        tables.append(("settings that differ", recipes))
    page = Page(
        f"{pipeline.folder.name}: {len(done)} of {len(pipeline.stages)} stages",
        columns=[*zip(done, cycle(COLOURS))],
        tables=tables,
        notes=names,
        plots=[*_plots(done)],
    )
    file = pipeline.folder / PAGE
    with atomic_file(file) as opened:
        opened.write(page.html().encode())
    return file


def _plots(done: Mapping[str, DoneStage]) -> "Sequence[tuple[str, str, Figure]]":
    """Draw the scores of all stages, with their intervals."""
    figure = new_figure(*SIZE)
    axes = figure.subplots()
    by_stage = {stage: scores_of(record) for stage, record in done.items()}
    for name in dict.fromkeys(name for scores in by_stage.values() for name in scores):
        points = [(stage, scores[name]) for stage, scores in by_stage.items() if name in scores]
        values = [score["value"] for _, score in points]
        ends = [
            [score[end] if score[end] is not None else score["value"] for _, score in points]
            for end in ("low", "high")
        ]
        bars = [
            [value - low for value, low in zip(values, ends[0], strict=True)],
            [high - value for value, high in zip(values, ends[1], strict=True)],
        ]
        axes.errorbar([stage for stage, _ in points], values, bars, fmt=".-", capsize=3, label=name)
    if not axes.has_data():
        return []
    axes.set_ylabel("score")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    return [("Scores by stage", "Means over held-out problems, with 95 % intervals.", figure)]

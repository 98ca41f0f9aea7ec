"""The frame of every benchmark: options, measurement, conclusions, table, figure, stored record.

`measure` yields the parts of the record as they become known; after each the record is stored, so
that an interrupted benchmark leaves what it has measured. Needs Python and typer.
"""

import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, NoReturn, TypeVar, get_type_hints

import typer
from pydantic import BaseModel, ConfigDict

from benchmarks.harness.processes import run_main
from benchmarks.harness.record import RESULTS, Record, environment, reserved, store, timestamp
from deploy.runtime.output import open_standard_streams, tolerant
from deploy.runtime.signals import raise_interrupts
from headway.nearest_name import nearest

Columns = Mapping[str, tuple[str, str]]
"""Columns of a table: the figure and its format by the title."""


class Options(BaseModel):
    """Options of a benchmark; a field is an option of the command, described for typer."""

    model_config = ConfigDict(frozen=True)

    out: Annotated[Path | None, typer.Option("--out", "--output", help="Where to store it.")] = None


def number(least: float, *, kind: Callable[[str], float] = int) -> Callable[[str], float]:
    """Return a parser of finite numbers of at least `least`; raises `typer.BadParameter`."""
    rule = f"{'a whole number' if kind is int else 'a number'}, at least {least:g}"

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value >= least):
            raise typer.BadParameter(f"{text} must be {rule}")
        return value

    return parse


def name_of(known: Iterable[str]) -> Callable[[str], str]:
    """Return a parser of known names; raises `typer.BadParameter`."""

    def parse(text: str) -> str:
        if text not in known:
            hint = nearest(text, known)
            raise typer.BadParameter(f"there are {', '.join(known)}, and not {text}{hint}")
        return text

    return parse


def choice(known: Iterable[str], about: str) -> Any:
    """Return an option that takes one of the known names."""
    return typer.Option(parser=name_of(known), metavar="|".join(known), help=about)


def several(parse: Callable[[str], object], about: str) -> Any:
    """Return an option of several values, separated by commas, each of which counts once."""

    def split(text: Any) -> tuple[object, ...]:
        parts = text.split(",") if isinstance(text, str) else text
        return tuple(dict.fromkeys(parse(part) for part in parts if part != ""))

    return typer.Option(parser=split, metavar="A,B,…", help=about)


Plan = TypeVar("Plan")


@dataclass(frozen=True, kw_only=True)
class Study(Generic[Plan]):
    """A benchmark: what is varied and measured, and what is concluded from it.

    The help text is the docstring of the module of `measure`.
    """

    name: str
    measure: Callable[[Plan], Iterable[Record]]
    """Yields parts of the record, each when it is known."""
    file: str = "{name}.json"
    """Name of the record; may hold {name}, {time} and the names of options."""
    options: type[Options] = Options
    plan: Callable[[Any], Plan] = lambda options: options
    """Checks the options together, before anything is written, and returns what is measured; raises
    `InputError`. By default the options themselves. The record stands in its `folder`, if any."""
    command: str = "headway bench"
    in_folder: bool = False
    """The option --out is a folder that holds `file`; otherwise it is the file."""
    continued: bool = False
    """A folder of an earlier run is continued; otherwise a folder has to be empty."""
    conclude: Callable[[Record], Record] = lambda record: {}
    """Conclusions from the record, which become part of it; pure."""
    table: Callable[[Record], str] = lambda record: ""
    """Text that is printed at the end; pure."""
    brief: Callable[[Record], str] | None = None
    """Markdown of its main figures for other pages, in place of `table`; pure."""
    figures: Callable[[Record, Path], None] | None = None
    """Writes further files into the folder of the record: a picture, a page."""
    misses: Callable[[Record], Sequence[str]] = lambda record: ()
    """Aims that were missed; with any, the exit code is 1."""

    def main(self) -> NoReturn:
        """Run the benchmark of the command line and end the process; errors are one message."""
        open_standard_streams()
        raise_interrupts()
        run_main(lambda: self.typer_command()(prog_name=f"{self.command} {self.name}"))

    def typer_command(self) -> Any:
        """Return the command, with a parameter for each field of `options`."""
        hints = get_type_hints(self.options, include_extras=True)
        hints = {name: hints[name] for name in self.options.model_fields}

        def call(**values: Any) -> None:
            sys.stdout = tolerant(sys.stdout)  # behind typer, which writes bytes
            raise typer.Exit(self.run(self.options(**values)))

        parameters = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.get_default(call_default_factory=True),
                annotation=hints[name],
            )
            for name, field in self.options.model_fields.items()
        ]
        vars(call).update(__signature__=inspect.Signature(parameters))
        call.__annotations__ = hints
        app = typer.Typer(
            add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
        )
        about = sys.modules[self.measure.__module__].__doc__ or ""
        app.command(help=about.replace("\n\n    ", "\n\n\b\n    "))(call)  # \b keeps lines apart
        return typer.main.get_command(app)

    def run(self, options: Any) -> int:
        """Measure, conclude, print and store; return 1 where an aim was missed, else 0.

        Raises:
            InputError: The options do not go together, or the record cannot be written.
        """
        plan = self.plan(options)
        file, arguments = self.record_file(options, plan), stored(options)
        record = environment() | {"arguments": arguments}
        with reserved(file, in_folder=self.in_folder, continued=self.continued):
            for part in self.measure(plan):
                record |= part
                record |= self.conclude(record)
                store(record, file)
        if text := self.table(record):
            print(text)
        misses = self.misses(record)
        for miss in misses:
            print(f"aim missed: {miss}")
        files = [file]
        if self.figures is not None:
            self.figures(record, file.parent)
            files += sorted(path for path in file.parent.glob(f"{file.stem}[._]*") if path != file)
        print(f"stored in {', '.join([str(file), *(path.name for path in files[1:])])}", flush=True)
        return int(bool(misses))

    def record_file(self, options: Options, plan: Plan) -> Path:
        """Return the path of the record."""
        if options.out is not None and not self.in_folder:
            return options.out
        folder: Any = options.out or getattr(plan, "folder", RESULTS)
        return Path(folder) / self.file.format(name=self.name, time=timestamp(), **stored(options))


def stored(options: Options) -> Record:
    """Return the values of the options, but for paths, which do not affect a measurement."""
    values = options.model_dump(exclude={"out"})
    return {name: value for name, value in values.items() if not isinstance(value, Path)}


def cells(figures: Mapping[str, Any], columns: Columns) -> list[str]:
    """Return the row of a table; a figure that is None is a dash."""
    shown = [(figures[key], form) for key, form in columns.values()]
    return ["–" if value is None else form.format(value) for value, form in shown]


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def text_table(head: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> str:
    """Return a table with columns aligned: the first to the left, the others to the right."""
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return "\n".join([*([title] if title else []), *aligned])

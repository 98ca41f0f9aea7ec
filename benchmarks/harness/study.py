"""The frame of every benchmark: options, measurement, conclusions, table, figure, stored record.

`measure` yields the parts of the record as they become known; after each the record is stored, so
that an interrupted benchmark leaves what it has measured. Needs Python and typer.
"""

import inspect
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Generic, NoReturn, TypeVar, get_type_hints

import typer

from benchmarks.harness.processes import run_main
from benchmarks.harness.record import RESULTS, Record, environment, reserved, store, timestamp
from deploy.runtime.output import open_standard_streams, tolerant
from deploy.runtime.signals import raise_interrupts
from headway.nearest_name import nearest


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a benchmark; a field is an option of the command, described for typer."""

    out: Annotated[Path | None, typer.Option("--out", "--output", help="Where to store it.")] = None


def number(
    least: float = -math.inf, *, kind: Callable[[str], float] = int
) -> Callable[[str], float]:
    """Return a parser of finite numbers of at least `least`; raises `typer.BadParameter`."""
    rule = "a whole number" if kind is int else "a number"
    rule += f", at least {least:g}" if least > -math.inf else ""

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
    """A benchmark: what is varied and measured, and what is concluded from it."""

    name: str
    """Name in `headway bench NAME`."""
    about: str
    """The help text: the module's docstring."""
    measure: Callable[[Plan], Iterable[Record]]
    """Yields parts of the record, each when it is known."""
    file: str
    """Name of the record; may hold {time} and the names of options."""
    options: type[Options] = Options
    plan: Callable[[Any], Plan] = lambda options: options
    """Checks the options together, before anything is written, and returns what is measured; raises
    `InputError`. By default the options themselves."""
    command: str = "headway bench"
    in_folder: bool = False
    """The option --out is a folder that holds `file`; otherwise it is the file."""
    continued: bool = False
    """A folder of an earlier run is continued; otherwise a folder has to be empty."""
    folder: Callable[[Plan], Path] = lambda plan: RESULTS
    """Returns the default folder of the record."""
    conclude: Callable[[Record], Record] = lambda record: {}
    """Conclusions from the record, which become part of it; pure."""
    table: Callable[[Record], str] = lambda record: ""
    """Text that is printed at the end; pure."""
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

        def call(**values: Any) -> None:
            sys.stdout = tolerant(sys.stdout)  # behind typer, which writes bytes
            raise typer.Exit(self.run(self.options(**values)))

        parameters = [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default if field.default_factory is MISSING else [],
                annotation=hints[field.name],
            )
            for field in fields(self.options)
        ]
        vars(call).update(__signature__=inspect.Signature(parameters))
        call.__annotations__ = hints
        app = typer.Typer(
            add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
        )
        app.command(help=self.about)(call)
        return typer.main.get_command(app)

    def run(self, options: Any) -> int:
        """Measure, conclude, print and store.

        Returns:
            The exit code: 1 where an aim was missed.

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
            files += sorted(path for path in file.parent.glob(f"{file.stem}.*") if path != file)
        print(f"stored in {', '.join([str(file), *(path.name for path in files[1:])])}", flush=True)
        return int(bool(misses))

    def record_file(self, options: Any, plan: Plan) -> Path:
        """Return the path of the record."""
        if options.out is not None and not self.in_folder:
            return Path(options.out)
        folder = Path(options.out or self.folder(plan))
        return folder / self.file.format(time=timestamp(), **stored(options))


def stored(options: Any) -> Record:
    """Return the values of the options, but for paths, which do not affect a measurement."""
    values = asdict(options)
    del values["out"]
    return {name: value for name, value in values.items() if not isinstance(value, Path)}

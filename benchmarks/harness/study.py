"""The frame of every benchmark: options, measurement, conclusions, table, figure, stored record.

`measure` yields the parts of the record as they become known; after each the record is stored, so
that an interrupted benchmark leaves what it has measured. Needs nothing but Python.
"""

import argparse
import math
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

from benchmarks.harness.provenance import RESULTS, environment, reserve, store
from benchmarks.harness.subprocesses import run_main
from deploy.runtime.output import open_standard_streams, tolerant
from deploy.runtime.signals import raise_interrupts
from headway.errors import InputError, is_bad_input
from headway.file_lock import locked
from headway.nearest_name import nearest

Record = dict[str, Any]
Options = argparse.Namespace


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a command: a flag, or a positional argument, with its keywords of argparse."""

    flag: str
    keywords: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The attribute of the parsed options."""
        return str(self.keywords.get("dest") or self.flag.lstrip("-").replace("-", "_"))


def option(flag: str, default: Any = None, about: str = "", **keywords: Any) -> Option:
    """Describe an option; its type is that of its default, and a list takes several values."""
    sample = default
    if isinstance(default, list) and default:
        keywords.setdefault("nargs", "+")
        sample = default[0]
    if "action" not in keywords and "choices" not in keywords and sample is not None:
        keywords.setdefault("type", type(sample))
    shown = "" if default is None or default == [] else f" ({_text(default)})"
    return Option(flag, {"default": default, "help": (about + shown).strip(), **keywords})


def _text(default: Any) -> str:
    values = default if isinstance(default, list) else [default]
    return " ".join(map(str, values)).replace("%", "%%")


def number(
    kind: type, least: float = -math.inf, *, above: float = -math.inf, most: float = math.inf
) -> Callable[[str], Any]:
    """Return the type of an option that is a finite number within bounds."""
    rule = "a whole number" if kind is int else "a number"
    rule += f", at least {least:g}" if least > -math.inf else ""
    rule += f", above {above:g}" if above > -math.inf else ""
    rule += f", at most {most:g}" if most < math.inf else ""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and least <= value <= most and value > above):
            raise argparse.ArgumentTypeError(f"{text} must be {rule}")
        return value

    return parse


@dataclass(frozen=True, kw_only=True)
class Study:
    """A benchmark: what is varied and measured, and what is concluded from it."""

    name: str
    """In `headway bench NAME`."""
    about: str
    """The help text: the module's docstring."""
    measure: Callable[[Options], Iterable[Record]]
    """Yields parts of the record, each when it is known."""
    file: str
    """Name of the record; may hold {time} and the names of options."""
    options: Sequence[Option] = ()
    command: str = "headway bench"
    check: Callable[[Options], None] | None = None
    """Checks options together, before anything is written; raises `InputError`."""
    in_folder: bool = False
    """The option --out is a folder that holds `file`; otherwise it is the file."""
    continued: bool = False
    """A folder of an earlier run is continued; otherwise a folder has to be empty."""
    folder: Path | None = RESULTS
    """Default folder of the record; None: `check` sets `options.out`."""
    where: str = ""
    """The default folder in the help; empty: derived from `folder`."""
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
        sys.stdout = tolerant(sys.stdout)
        raise_interrupts()
        run_main(lambda: self.run(self.parse()))

    def parser(self) -> argparse.ArgumentParser:
        """Return the parser of the benchmark's options."""
        parser = argparse.ArgumentParser(
            prog=f"{self.command} {self.name}".strip(),
            description=self.about,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for described in self.options:
            parser.add_argument(described.flag, **described.keywords)
        kind = "file"
        if self.in_folder:
            kind = "folder (continued where it exists)" if self.continued else "new or empty folder"
        derived = self.folder.name if self.folder else f"runs/bench-{self.name}-TIME"
        where = self.where or derived
        parser.add_argument(
            "--out", "--output", type=Path, help=f"{kind} of the figures, else in {where}/"
        )
        return parser

    def parse(self, arguments: Sequence[str] | None = None) -> Options:
        """Read the command line; an option that is wrong ends the process with exit code 2."""
        parser = self.parser()
        options, unknown = parser.parse_known_args(arguments)
        if unknown:
            names = ["out", *(described.flag.lstrip("-") for described in self.options)]
            hint = nearest(unknown[0].lstrip("-"), names)
            parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return options

    def run(self, options: Options) -> int:
        """Measure, conclude, print and store.

        Returns:
            The exit code: 1 where an aim was missed.

        Raises:
            InputError: The options do not go together, or the record cannot be written.
        """
        if self.check is not None:
            self.check(options)
        file = self.record_file(options)
        record = environment() | {"arguments": self._arguments(options)}
        with ExitStack() as block:
            block.enter_context(alone(file.parent if self.in_folder else file))
            if self.in_folder and not self.continued:
                check_empty(file.parent)
            if self.in_folder:
                block.enter_context(refused_without_trace(file.parent))
            reserve(file)
            for part in self.measure(options):
                record |= part
                record |= self.conclude(record)
                store(record, file)
        if text := self.table(record):
            print(text)
        misses = self.misses(record)
        for miss in misses:
            print(f"aim missed: {miss}")
        if self.figures is not None:
            self.figures(record, file.parent)
        beside = sorted(path.name for path in file.parent.glob(f"{file.stem}.*") if path != file)
        drawn = beside if self.figures is not None else []
        print(f"stored in {', '.join([str(file), *drawn])}", flush=True)
        return int(bool(misses))

    def record_file(self, options: Options) -> Path:
        """Return the path of the record."""
        if options.out is not None and not self.in_folder:
            return Path(options.out)
        folder = options.out or self.folder or Path()
        time = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
        return Path(folder) / self.file.format(time=time, **self._arguments(options))

    def _arguments(self, options: Options) -> Record:
        """Return the values of the options, but for paths, which do not affect a measurement."""
        values = {described.name: getattr(options, described.name) for described in self.options}
        return {name: value for name, value in values.items() if not isinstance(value, Path)}


def check_empty(folder: Path) -> None:
    """Raise `InputError` for a path that holds anything."""
    if folder.is_dir() and next(folder.iterdir(), None) is None:
        return
    if folder.exists():
        raise InputError(
            f"--out {folder} is not empty, and this benchmark measures all its runs in one go; "
            "name another folder, or delete it"
        )


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Keep other benchmarks from writing to a file or folder during the block.

    Of the parent folders that are missing, those that are empty after the block are deleted.

    Raises:
        InputError: Another one writes to it, or the parent folder cannot be written.
    """
    made = [parent for parent in path.parents if not parent.exists()]
    with ExitStack() as block:
        try:
            lock = path.with_name(f".{path.name}.lock")
            block.enter_context(locked(lock, passing=True, parents=True))
        except BlockingIOError:
            raise InputError(f"another benchmark writes to {path}; choose another --out") from None
        except OSError as error:
            raise InputError(f"{path} cannot be written: {error.strerror}") from None
        try:
            yield
        finally:
            block.close()
            with suppress(OSError):
                for parent in made:
                    parent.rmdir()


@contextmanager
def refused_without_trace(folder: Path) -> Iterator[None]:
    """Delete a folder that the block has made if the block refuses its input.

    A folder where a batch was trained stays.
    """
    made = not folder.exists()
    try:
        yield
    except Exception as error:
        refused = is_bad_input(error)
        trained = any(file.stat().st_size for file in folder.glob("*/metrics.jsonl"))
        if refused and made and not trained:
            shutil.rmtree(folder, ignore_errors=True)
        raise


Columns = Mapping[str, tuple[str, str]]
"""Columns of a table: the figure and its format by the title."""


def cells(figures: Mapping[str, Any], columns: Columns) -> list[str]:
    """Return the row of a table; a figure that is None is a dash."""
    shown = [(figures[key], form) for key, form in columns.values()]
    return ["–" if value is None else form.format(value) for value, form in shown]


def medians_over(rounds: Sequence[Any]) -> Any:
    """Return the median over rounds of every figure of nested dictionaries, without `raw`.

    It is None where a round has none.
    """
    if not isinstance(rounds[0], dict):
        return None if None in rounds else median(rounds)
    names = [name for name in rounds[0] if name != "raw"]
    return {name: medians_over([figures[name] for figures in rounds]) for name in names}


def text_table(head: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> str:
    """Return a table with columns aligned: the first to the left, the others to the right."""
    cells = [list(head), *(list(row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    lines = [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    return "\n".join([*([title] if title else []), *lines])


def whole_numbers(text: str, flag: str, or_else: str | None = None) -> tuple[str, ...]:
    """Return the whole numbers of a list on the command line, each once, without leading zeros.

    Raises:
        InputError: Something else is in the list.
    """
    parts = text.split(",")
    if not all(part.isdecimal() or part == or_else for part in parts):
        allowed = f" or {or_else!r}" if or_else else ""
        raise InputError(f"{flag} {text!r}: give whole numbers{allowed}, separated by commas")
    return tuple(dict.fromkeys(part if part == or_else else str(int(part)) for part in parts))


def known_names(text: str, flag: str, known: Iterable[str]) -> tuple[str, ...]:
    """Return the names of a list on the command line, each once.

    Raises:
        InputError: A name is not among those known.
    """
    names = tuple(dict.fromkeys(filter(None, text.split(","))))
    if unknown := sorted(set(names) - set(known)):
        raise InputError(
            f"{flag} {text!r}: there are {', '.join(known)}, and not {', '.join(unknown)}"
            f"{nearest(unknown[0], known)}"
        )
    return names

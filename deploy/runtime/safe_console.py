"""Output that may hold text from outside: no markup, no control characters, no secrets."""

import logging
import sys
import traceback
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

from deploy.runtime.output import tolerant

WIDEST = 1000
"""Columns of a terminal that a table may need."""


def clean(text: str) -> str:
    """Return a text for a terminal or a log."""
    from headway.clean_text import printable, without_secrets  # after `check_not_shadowed`

    return printable(without_secrets(text))


def echo(text: str, *, nl: bool = True) -> None:
    """Print a text to the standard output, with a newline if `nl`."""
    typer.echo(clean(text), nl=nl)


class SafeConsole(Console):
    """A rich console that shows strings as they are, but cleaned, and drops what it cannot show."""

    def __init__(self, *, stderr: bool = False, **options: Any) -> None:
        file = tolerant(sys.stderr if stderr else sys.stdout)
        defaults = {"file": file, "highlight": False, "markup": False, "emoji": False}
        super().__init__(**{**defaults, **options})

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield the parts of a renderable; rich itself makes those that control the terminal."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(clean(segment.text), segment.style)


def print_whole(console: Console, table: Table) -> None:
    """Print a table as wide as it needs to be: a terminal wraps its lines, and cuts no figure."""
    usual = console.width
    needed = console.measure(table, options=console.options.update(max_width=WIDEST)).maximum
    console.width = max(usual, needed)
    console.print(table)
    console.width = usual


class CleanFormatter(logging.Formatter):
    """Formats records of a log; lines of a message after its first are indented."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record."""
        return clean(super().format(record)).replace("\n", "\n    ")


def print_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print the traceback of an error that nobody expected, as a `sys.excepthook`."""
    sys.stderr.write(clean("".join(traceback.format_exception(kind, error, trace))))

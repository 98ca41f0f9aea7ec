"""Tables of figures."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Columns = Mapping[str, tuple[str, str]]
"""Columns of a table: the figure and its format by the title."""


def cells(figures: Mapping[str, Any], columns: Columns) -> list[str]:
    """Return the row of a table; a figure that is None is a dash."""
    shown = [(figures[key], form) for key, form in columns.values()]
    return ["–" if value is None else form.format(value) for value, form in shown]


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

"""Tables of comparisons of training runs: medians over seeds or rounds."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.harness.study import Columns, text_table

Run = Mapping[str, Any]
"""Figures of one run, with its name, seed and kind."""
Groups = Mapping[str, Sequence[Run]]
"""Runs by name: one for each seed or round."""


def group(runs: Sequence[Run], kind: str) -> dict[str, list[Run]]:
    """Return the runs of a kind by name, in the order of the first seed."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        if run["kind"] == kind:
            groups.setdefault(run["name"], []).append(run)
    return groups


def median_of(runs: Sequence[Run], key: str) -> float | None:
    """Return the median of a figure over seeds; None where a run has none."""
    values = [run[key] for run in runs]
    return None if None in values else median(values)


def seeds_of(runs: Sequence[Run]) -> int:
    """Return the number of different seeds of runs."""
    return len({run["seed"] for run in runs})


def medians_table(
    head: str, groups: Groups, columns: Columns, *, seeds: int, title: str = ""
) -> str:
    """Return a table of medians over seeds, a row for each name; with fewer runs, it says so.

    `head` stands above the names.
    """
    rows = []
    for name, runs in groups.items():
        values = [(median_of(runs, key), form) for key, form in columns.values()]
        fewer = f" ({len(runs)} seed(s))" if len(runs) < seeds else ""
        shown = ["–" if value is None else form.format(value) for value, form in values]
        rows.append([name + fewer, *shown])
    return text_table([head, *columns], rows, title)

"""Throughput of the broker, beside what one Ray call and the disk allow.

    headway bench queue [--actors 1,4] [--tokens 100,8000]

For each number of simulated actors and each length, in the current folder: the groups/s that the
broker of a run accepts of actors that generate in no time, and those of one Ray call after another
to a process whose only thread writes and syncs the same bytes. Takes about 15 minutes.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from benchmarks.harness.processes import local_ray
from benchmarks.harness.record import Record
from benchmarks.harness.study import Options, Study, cells, number, several, text_table

OF_CEILING = 0.7
COLUMNS = {
    "tokens": ("tokens", "{}"),
    "actors": ("actors", "{}"),
    "groups/s": ("groups_per_second", "{:,.0f}"),
    "MB/s": ("megabytes_per_second", "{:.1f}"),
    "one call and the disk": ("ceiling_groups_per_second", "{:,.0f}"),
    "share": ("of_ceiling", "{:.2f}"),
}


class QueueOptions(Options):
    """Options of `headway bench queue`."""

    actors: Annotated[Sequence[int], several(number(1), "Simulated.")] = (1, 4, 16, 64)
    tokens: Annotated[Sequence[int], several(number(4), "Of each rollout.")] = (100, 1000, 8000)
    rounds: Annotated[int, typer.Option(min=1, help="Of all measurements.")] = 3


def measure(options: QueueOptions) -> Iterator[Record]:
    pairs = [(tokens, actors) for tokens in options.tokens for actors in options.actors]
    rounds: dict[tuple[int, int], list[Record]] = {pair: [] for pair in pairs}
    with local_ray(cores=4), TemporaryDirectory(dir=Path(), prefix=".bench-queue-") as name:
        for _, (tokens, actors) in product(range(options.rounds), pairs):
            figures = measure_pair(tokens, actors, Path(name))
            rounds[tokens, actors].append(figures)
            shown = {"tokens": tokens, "actors": actors, **figures}
            print(text_table([*COLUMNS], [cells(shown, COLUMNS)]), flush=True)
    yield {
        "settings": [
            {"tokens": tokens, "actors": actors, **medians(measured), "rounds": measured}
            for (tokens, actors), measured in rounds.items()
        ]
    }


def medians(rounds: Sequence[Record]) -> Record:
    """Return the median over rounds of each figure; the ratios are of each round."""
    return {key: median(row[key] for row in rounds) for key in rounds[0] if key != "raw"}


def measure_pair(tokens: int, actors: int, folder: Path) -> Record:
    """Return the rate of the broker and of its ceiling for one length and number of actors."""
    from benchmarks.broker.load import template
    from benchmarks.broker.rates import measure_ceiling, measure_setting

    ceiling = measure_ceiling(tokens, folder)
    measured = measure_setting(actors, 0.0, tokens, folder)
    rate = measured["accepted_groups_per_second"]
    return {
        "groups_per_second": rate,
        "megabytes_per_second": rate * len(template(tokens)) / 1e6,
        "ceiling_groups_per_second": ceiling,
        "of_ceiling": rate / ceiling,
        "raw": measured,
    }


def misses(record: Record) -> list[str]:
    rows = record["settings"]
    low = [row for row in rows if row["of_ceiling"] < OF_CEILING]
    text = f"{len(low)} of {len(rows)} settings have less than {OF_CEILING:g} of the ceiling"
    return [text] if low else []


def table(record: Record) -> str:
    title = f"medians of {record['arguments']['rounds']} rounds, groups of 8 rollouts"
    return text_table([*COLUMNS], [cells(row, COLUMNS) for row in record["settings"]], title)


STUDY = Study(
    name="queue",
    options=QueueOptions,
    measure=measure,
    table=table,
    misses=misses,
)

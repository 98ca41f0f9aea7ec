"""Weight updates by an adapter beside those by full weights, and the engine's speed with both.

    headway bench lora

With requests running throughout, updates of both kinds take turns on one engine, whose worker
merges an adapter's factors into its model folder; after each its tokens/s are counted. Leaves out
other nodes and GPUs.
"""

from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Annotated

import typer

from benchmarks.harness.record import Record
from benchmarks.harness.study import Options, Study, cells, choice, text_table
from benchmarks.harness.synthetic_load import qwen3_size
from benchmarks.weights.sending import FULL, UPDATE_COLUMNS, UpdatePlan, medians

FIGURES = {**UPDATE_COLUMNS, "tokens/s": ("tokens_per_second", "{:.0f}")}
AIMS = {"bytes": 0.02, "stall": 1.0, "serving": 1.0}
"""Largest figures of an adapter over those of full weights, medians of rounds."""
LEAST_SPEED = 0.9
"""Smallest tokens/s with an adapter over those with full weights."""
COUNT_SECONDS, TOKENS = 6.0, 20
"""Time in which tokens are counted, and length of the requests."""


class LoraOptions(Options):
    """Options of `headway bench lora`."""

    hidden: Annotated[int, typer.Option(min=128, help="Width of the model.")] = 1024
    layers: Annotated[int, typer.Option(min=1, help="Of the model.")] = 2
    rank: Annotated[int, typer.Option(min=1, help="Of the adapter, on every projection.")] = 8
    dtype: Annotated[str, choice(("float32", "bfloat16"), "Of weights and engine.")] = "float32"
    rounds: Annotated[int, typer.Option(min=1, help="With an update of each kind.")] = 9


def measure(options: LoraOptions) -> Iterator[Record]:
    from benchmarks.weights.updates import measure_updates

    full = replace(FULL, wire=options.dtype)
    plan = UpdatePlan(
        qwen3_size(options.hidden, options.layers),
        options.rounds,
        [[full, replace(full, rank=options.rank)]],
        dtype=options.dtype,
        request_tokens=TOKENS,
        count_seconds=COUNT_SECONDS,
    )
    yield measure_updates(plan)


def conclude(record: Record) -> Record:
    full, adapter = record["ways"].values()
    ratios = {
        key: median(own / whole for own, whole in zip(adapter[key], full[key], strict=True))
        for key, _ in FIGURES.values()
    }
    return {"medians": medians(record), "ratios": ratios}


def table(record: Record) -> str:
    rows = [[name, *cells(figures, FIGURES)] for name, figures in record["medians"].items()]
    ratios = {name: (key, "{:.4f}") for name, (key, _) in FIGURES.items()}
    rows.append(["adapter / full", *cells(record["ratios"], ratios)])
    return text_table(["seconds", *FIGURES], rows, f"{record['parameters']:,} parameters")


def misses(record: Record) -> list[str]:
    ratios = record["ratios"]
    missed = [
        f"{key} {ratios[key]:.3f} of full weights', at most {most:g}"
        for key, most in AIMS.items()
        if ratios[key] > most
    ]
    if (speed := ratios["tokens_per_second"]) < LEAST_SPEED:
        missed.append(f"{speed:.3f} of the tokens/s, at least {LEAST_SPEED:g}")
    return missed


STUDY = Study(
    name="lora",
    options=LoraOptions,
    file="lora_{time}.json",
    measure=measure,
    conclude=conclude,
    table=table,
    misses=misses,
)

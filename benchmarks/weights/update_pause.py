"""Duration of the stop of generation by a weight update.

    headway bench update-pause

With requests running throughout, each round measures vLLM's pause and resume with nothing in
between, the bare load of the same weights by vLLM's calls, and the whole in-flight swap. The figure
of merit, stall / (pause + 2 × load), must not exceed 1. Leaves out transfer between nodes.
"""

from collections.abc import Iterator
from statistics import median
from typing import Annotated

import typer

from benchmarks.harness.record import Record
from benchmarks.harness.study import Options, Study, choice, text_table
from benchmarks.harness.synthetic_load import MAX_MODEL_LEN, SIZES, qwen3_size
from benchmarks.weights.sending import FULL, UpdatePlan, medians

REQUESTS = 64
"""Number of requests that run throughout."""
LARGE_ENOUGH = [name for name, size in SIZES.items() if size.longest >= MAX_MODEL_LEN]


class PauseOptions(Options):
    """Options of `headway bench update-pause`."""

    rounds: Annotated[int, typer.Option(min=7, help="Repetitions, of which medians are.")] = 9
    size: Annotated[
        str, choice(("small", *LARGE_ENOUGH), "Of the model, as in `headway bench train`.")
    ] = "small"
    dtype: Annotated[str, choice(("float32", "bfloat16"), "Of weights and engine.")] = "float32"


def measure(options: PauseOptions) -> Iterator[Record]:
    from benchmarks.weights.updates import measure_updates

    size = SIZES.get(options.size) or qwen3_size(256, 4)
    plan = UpdatePlan(size, options.rounds, [[FULL]], dtype=options.dtype, requests=REQUESTS)
    yield measure_updates(plan)


def conclude(record: Record) -> Record:
    figures = medians(record)[FULL.name]
    ratio = figures["stall"] / (figures["empty_pause"] + 2 * figures["bare_load"])
    return {"medians": figures, "ratio": ratio}


def table(record: Record) -> str:
    ways = record["ways"][FULL.name]
    rows = [
        [key, *(f"{1e3 * figure(ways[key]):.1f}" for figure in (median, min, max))]
        for key in record["medians"]
        if key not in ("bytes", "changed")
    ]
    title = f"{record['parameters']:,} parameters, {record['bytes']:,} bytes, {REQUESTS} requests"
    text = text_table(["milliseconds", "median", "least", "most"], rows, title)
    return f"{text}\nstall / (empty_pause + 2 × bare_load) = {record['ratio']:.2f} (must be ≤ 1)"


STUDY = Study(
    name="update-pause",
    options=PauseOptions,
    file="update_pause_{time}.json",
    measure=measure,
    conclude=conclude,
    table=table,
    misses=lambda record: ["the swap takes too long"] if record["ratio"] > 1 else [],
)

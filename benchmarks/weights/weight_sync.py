"""Weight updates of every transport and codec beside a memcpy and vLLM's own reload.

    headway bench weight-sync --megabytes 3

With requests running throughout: the learner's wait, the engine's preparation and stall, and the
time until it serves; then tokens/s with an update every second and with none. Leaves out other
nodes and GPUs.
"""

from collections.abc import Iterator
from statistics import median
from typing import Annotated

import typer

from benchmarks.harness.record import Record
from benchmarks.harness.study import Options, Study, cells, choice, text_table
from benchmarks.harness.synthetic_load import qwen3_size
from benchmarks.weights.sending import FULL, UPDATE_COLUMNS, Sending, UpdatePlan, medians

SHAPES = {"3": (128, 3), "100": (512, 8), "1000": (1024, 20)}
"""Hidden size and layers of a Qwen3 with about so many megabytes of float32."""
SENDINGS = (
    FULL,
    Sending("shared_memory", "full", "bfloat16"),
    Sending("shared_memory", "delta"),
    Sending("filesystem"),
    Sending("filesystem", "delta"),
)
COLUMNS = {
    **UPDATE_COLUMNS,
    "publish/memcpy": ("publish_per_memcpy", "{:.2f}"),
    "stall/load": ("stall_per_load", "{:.2f}"),
    "serving/load+4memcpy": ("serving_per_load_and_4_memcpy", "{:.2f}"),
}


class SyncOptions(Options):
    """Options of `headway bench weight-sync`."""

    megabytes: Annotated[str, choice(SHAPES, "Of the model.")] = "3"
    rounds: Annotated[int, typer.Option(min=1, help="Updates of each way that count.")] = 5
    ways: Annotated[int | None, typer.Option(min=1, help="Only the first so many.")] = None
    windows: Annotated[int, typer.Option(min=0, help="Of each kind, for tokens a second.")] = 4


def measure(options: SyncOptions) -> Iterator[Record]:
    from benchmarks.weights.updates import measure_updates

    size = qwen3_size(*SHAPES[options.megabytes])
    ways = [[way] for way in SENDINGS[: options.ways]]
    yield measure_updates(UpdatePlan(size, options.rounds, ways, loss_windows=options.windows))


def conclude(record: Record) -> Record:
    ways = medians(record)
    copied, bare = median(record["memcpy"]), ways[FULL.name]["bare_load"]
    for row in ways.values():
        row |= {
            "publish_per_memcpy": row["publish"] / copied,
            "stall_per_load": row["stall"] / bare,
            "serving_per_load_and_4_memcpy": row["serving"] / (bare + 4 * copied),
        }
    concluded: Record = {"ways": ways, "memcpy": copied}
    if "tokens_per_second" in record:
        rates = {key: median(values) for key, values in record["tokens_per_second"].items()}
        rates["lost"] = 1 - rates["with"] / rates["without"]
        rates["lost_beyond_stalls"] = rates["lost"] - rates["stalled"]
        concluded["tokens_per_second"] = rates
    return {"medians": concluded}


def table(record: Record) -> str:
    medians = record["medians"]
    full = medians["ways"][FULL.name]
    title = (
        f"{record['bytes']:,} bytes: memcpy {medians['memcpy']:.4f} s, vLLM's bare load "
        f"{full['bare_load']:.3f} s, its empty pause {full['empty_pause']:.4f} s"
    )
    rows = [[name, *cells(row, COLUMNS)] for name, row in medians["ways"].items()]
    lines = [text_table(["seconds", *COLUMNS], rows, title)]
    if rates := medians.get("tokens_per_second"):
        lines.append(
            f"tokens a second: {rates['without']:.0f} without updates, {rates['with']:.0f} with "
            f"{rates['updates']:.2f} a second: {rates['lost']:.1%} lost, of which stalls are "
            f"{rates['stalled']:.1%}"
        )
    return "\n".join(lines)


STUDY = Study(
    name="weight-sync",
    options=SyncOptions,
    file="weight_sync_{megabytes}mb_{time}.json",
    measure=measure,
    conclude=conclude,
    table=table,
)

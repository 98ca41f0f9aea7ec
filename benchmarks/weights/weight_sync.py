"""Weight updates of every transport and codec beside a memcpy and vLLM's own reload.

    headway bench weight-sync --megabytes 3

With requests running throughout: the learner's wait, the engine's preparation and stall, and the
time until it serves; then tokens/s with an update every second and with none, and with --faults the
recovery from faults. Leaves out other nodes and GPUs.
"""

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from benchmarks.harness.study import Options, Record, Study, cells, number, option, text_table

SHAPES = {3: (128, 3), 100: (512, 8), 1000: (1024, 20)}
"""Hidden size and layers of a Qwen3 with about so many megabytes of float32."""


COLUMNS = {
    "publish": ("publish", "{:.4f}"),
    "prepare": ("prepare", "{:.4f}"),
    "stall": ("stall", "{:.4f}"),
    "serving": ("serving", "{:.4f}"),
    "bytes": ("bytes", "{:,.0f}"),
    "publish/memcpy": ("publish_per_memcpy", "{:.2f}"),
    "stall/load": ("stall_per_load", "{:.2f}"),
    "serving/load+4memcpy": ("serving_per_load_and_4_memcpy", "{:.2f}"),
}


def measure(options: Options) -> Iterator[Record]:
    from benchmarks.weights.engine_load import build_model, qwen3_size
    from benchmarks.weights.update_rounds import measure_all
    from benchmarks.weights.weight_faults import measure_faults

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        build_model(folder / "model", qwen3_size(*SHAPES[options.megabytes]))
        raw = asyncio.run(measure_all(options, folder))
        yield {"raw": raw}
        if options.faults:
            build_model(folder / "small", qwen3_size(*SHAPES[3]))
            print("from a fault until every engine serves the newest version again:")
            faults = measure_faults(folder / "small", folder / "faulty", options.fault_rounds)
            yield {"raw": raw | {"faults": asyncio.run(faults)}}


def conclude(record: Record) -> Record:
    raw = record["raw"]
    memcpy, first = median(raw["memcpy"]), next(iter(raw["ways"].values()))
    bare, empty = (median(first[key]) for key in ("bare_load", "empty_pause"))
    medians: Record = {"memcpy": memcpy, "bare_load": bare, "empty_pause": empty}
    for name, figures in raw["ways"].items():
        keys = ("publish", "prepare", "stall", "serving", "bytes")
        row = {key: median(figures[key]) for key in keys}
        medians[name] = row | {
            "publish_per_memcpy": row["publish"] / memcpy,
            "stall_per_load": row["stall"] / bare,
            "serving_per_load_and_4_memcpy": row["serving"] / (bare + 4 * memcpy),
        }
    if "faults" in raw:
        medians["recovery"] = {fault: median(values) for fault, values in raw["faults"].items()}
    if "tokens_per_second" in raw:
        rates = {key: median(values) for key, values in raw["tokens_per_second"].items()}
        rates["lost"] = 1 - rates["with"] / rates["without"]
        rates["lost_beyond_stalls"] = rates["lost"] - rates["stalled"]
        medians["tokens_per_second"] = rates
    return {"medians": medians}


def table(record: Record) -> str:
    raw, medians = record["raw"], record["medians"]
    title = (
        f"{raw['bytes']:,} bytes: memcpy {medians['memcpy']:.4f} s, vLLM's bare load "
        f"{medians['bare_load']:.3f} s, its empty pause {medians['empty_pause']:.4f} s"
    )
    rows = [[name, *cells(medians[name], COLUMNS)] for name in raw["ways"]]
    lines = [text_table(["seconds", *COLUMNS], rows, title)]
    for fault, seconds in medians.get("recovery", {}).items():
        lines.append(f"{fault:30s} {seconds:7.2f} s to recover")
    if rates := medians.get("tokens_per_second"):
        lines.append(
            f"tokens a second: {rates['without']:.0f} without updates, {rates['with']:.0f} with "
            f"{rates['updates']:.2f} a second: {rates['lost']:.1%} lost, of which stalls are "
            f"{rates['stalled']:.1%}"
        )
    return "\n".join(lines)


COUNT = number(int, 1)
STUDY = Study(
    name="weight-sync",
    about=__doc__,
    options=(
        option("--megabytes", 3, "of the model", type=int, choices=sorted(SHAPES)),
        option("--rounds", 5, "updates of each way that count", type=COUNT),
        option("--ways", None, "only the first so many", type=COUNT),
        option("--windows", 4, "of each kind, for tokens a second", type=number(int, 0)),
        option("--faults", False, "also put faults in, on 3 MB", action="store_true"),
        option("--fault-rounds", 3, "times that each fault is put in", type=COUNT),
    ),
    file="weight_sync_{megabytes}mb_{time}.json",
    measure=measure,
    conclude=conclude,
    table=table,
)

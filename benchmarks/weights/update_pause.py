"""Duration of the stop of generation by a weight update.

    headway bench update-pause

With requests running throughout, each round measures vLLM's pause and resume with nothing in
between, the bare load of the same weights by vLLM's calls, and the whole in-flight swap. The figure
of merit, stall / (pause + 2 × load), must not exceed 1. Leaves out transfer between nodes.
"""

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from benchmarks.harness.study import Options, Record, Study, number, option
from benchmarks.harness.synthetic_load import MAX_MODEL_LEN, SIZES

REQUESTS = 64
"""Running throughout."""


def measure(options: Options) -> Iterator[Record]:
    from benchmarks.weights.engine_load import build_model, qwen3_size

    size = SIZES.get(options.size) or qwen3_size(256, 4)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        yield {"parameters": build_model(folder / "model", size, options.dtype)}
        yield asyncio.run(measure_rounds(options, folder))


async def measure_rounds(options: Options, folder: Path) -> Record:
    from benchmarks.weights.engine_load import Load, start_engine
    from benchmarks.weights.update_rounds import SENDINGS, WARM_UP_SECONDS, Bench

    engine = await start_engine(
        folder / "model", initial_version=0, dtype=options.dtype, max_concurrent_rollouts=REQUESTS
    )
    try:
        load = Load(engine, REQUESTS)
        await asyncio.sleep(WARM_UP_SECONDS)
        bench = Bench(engine, folder)
        raw = await bench.measure(SENDINGS[0], options.rounds)
        await load.stop()
    finally:
        await engine.close()
    return {"raw": raw, "bytes": bench.bytes, "requests_that_crossed": load.crossed}


def conclude(record: Record) -> Record:
    if "raw" not in record:
        return {}
    seconds = record["raw"].keys() - {"bytes", "changed"}
    medians = {key: median(record["raw"][key]) for key in sorted(seconds)}
    ratio = medians["stall"] / (medians["empty_pause"] + 2 * medians["bare_load"])
    return {"medians": medians, "ratio": ratio}


def table(record: Record) -> str:
    lines = [f"{record['parameters']:,} parameters, {record['bytes']:,} bytes, {REQUESTS} requests"]
    for key, middle in record["medians"].items():
        values = record["raw"][key]
        lines.append(
            f"{key:20s} median {1e3 * middle:8.1f} ms   "
            f"{1e3 * min(values):8.1f} … {1e3 * max(values):.1f}"
        )
    ratio = f"stall / (empty_pause + 2 × bare_load) = {record['ratio']:.2f}   (must be ≤ 1)"
    return "\n".join([*lines, ratio])


STUDY = Study(
    name="update-pause",
    about=__doc__,
    options=(
        option("--rounds", 9, "repetitions; medians need at least 7", type=number(int, 7)),
        option(
            "--size",
            None,
            "a model of `headway bench train` instead of a small one",
            choices=[name for name, size in SIZES.items() if size.longest >= MAX_MODEL_LEN],
        ),
        option("--dtype", "float32", "of weights and engine", choices=["float32", "bfloat16"]),
    ),
    file="update_pause_{time}.json",
    measure=measure,
    conclude=conclude,
    table=table,
    misses=lambda record: ["the swap takes too long"] if record["ratio"] > 1 else [],
)

"""Weight updates by an adapter beside those by full weights, and the engine's speed with both.

    headway bench lora

With requests running throughout, updates of both kinds take turns on one engine, whose worker
merges an adapter's factors into its model folder. Then tokens/s while it serves either, without
updates and with one every second. Leaves out other nodes and GPUs.
"""

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from benchmarks.harness.study import Options, Record, Study, cells, number, option, text_table

FIGURES = {
    "publish": ("publish", "{:.4f}"),
    "prepare": ("prepare", "{:.4f}"),
    "stall": ("stall", "{:.4f}"),
    "serving": ("serving", "{:.3f}"),
    "bytes": ("bytes", "{:,.0f}"),
    "tokens/s": ("without", "{:.0f}"),
    "… updated": ("with", "{:.0f}"),
}
AIMS = {"bytes": 0.02, "stall": 1.0, "serving": 1.0}
"""Largest figures of an adapter, in units of those of full weights."""
LEAST_SPEED = 0.9
"""Smallest tokens/s with an adapter, in units of those with full weights."""


def measure(options: Options) -> Iterator[Record]:
    from benchmarks.weights.engine_load import build_model, qwen3_size

    size = qwen3_size(options.hidden, options.layers)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        yield {"parameters": build_model(folder / "model", size, options.dtype)}
        yield asyncio.run(measure_rounds(options, folder))


async def measure_rounds(options: Options, folder: Path) -> Record:
    """Measure both kinds in turn, as often as asked."""
    from benchmarks.weights.engine_load import Load, start_engine
    from benchmarks.weights.learner_process import Sending
    from benchmarks.weights.update_rounds import REQUESTS, WARM_UP_SECONDS, Bench

    wire = options.dtype
    sendings = {
        "full": Sending("shared_memory", wire=wire),
        "adapter": Sending("shared_memory", wire=wire, rank=options.rank),
    }
    raw: Record = {name: {} for name in sendings}
    engine = await start_engine(folder / "model", initial_version=0, dtype=options.dtype)
    bench = Bench(engine, folder)
    try:
        for _ in range(options.rounds):
            load = Load(engine, REQUESTS)
            await asyncio.sleep(WARM_UP_SECONDS)
            measured = [await bench.measure(one, options.updates) for one in sendings.values()]
            await load.stop()
            for index, sending in enumerate(sendings.values()):
                measured[index] |= await bench.measure_loss(sending, windows=1)
            for name, figures in zip(sendings, measured, strict=True):
                for key, values in figures.items():
                    raw[name].setdefault(key, []).extend(values)
    finally:
        await engine.close()
    return {"raw": raw, "model_bytes": bench.bytes}


def conclude(record: Record) -> Record:
    if "raw" not in record:
        return {}
    medians = {
        name: {key: median(figures[key]) for _, (key, _) in FIGURES.items()}
        for name, figures in record["raw"].items()
    }
    full, adapter = medians["full"], medians["adapter"]
    return {"medians": medians, "ratios": {key: adapter[key] / full[key] for key in full}}


def table(record: Record) -> str:
    rows = [[name, *cells(figures, FIGURES)] for name, figures in record["medians"].items()]
    ratios = {name: (key, "{:.4f}") for name, (key, _) in FIGURES.items()}
    rows.append(["adapter / full", *cells(record["ratios"], ratios)])
    title = f"{record['parameters']:,} parameters, rank {record['arguments']['rank']}"
    return text_table(["seconds", *FIGURES], rows, title)


def misses(record: Record) -> list[str]:
    ratios = record["ratios"]
    missed = [
        f"{key} {ratios[key]:.3f} of full weights', at most {most:g}"
        for key, most in AIMS.items()
        if ratios[key] > most
    ]
    if ratios["without"] < LEAST_SPEED:
        missed.append(f"{ratios['without']:.3f} of the tokens/s, at least {LEAST_SPEED:g}")
    return missed


COUNT = number(int, 1)
STUDY = Study(
    name="lora",
    about=__doc__,
    options=(
        option("--hidden", 1024, "width of the model", type=number(int, 64)),
        option("--layers", 2, "of the model", type=COUNT),
        option("--rank", 8, "of the adapter, on every linear layer but the head", type=COUNT),
        option("--dtype", "float32", "of weights and engine", choices=["float32", "bfloat16"]),
        option("--rounds", 3, "in which both kinds take turns", type=COUNT),
        option("--updates", 5, "of each kind in a round", type=COUNT),
    ),
    file="lora_{time}.json",
    measure=measure,
    conclude=conclude,
    table=table,
    misses=misses,
)

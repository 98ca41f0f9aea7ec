"""Weight updates by an adapter beside those by full weights, and the engine's speed with both.

    headway bench lora

With requests running throughout, updates of both kinds take turns on one engine, whose worker
merges an adapter's factors into its model folder; after each its tokens/s are counted. Leaves out
other nodes and GPUs.
"""

import asyncio
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks.harness.study import Options, Record, Study, cells, number, option, text_table

FIGURES = {
    "publish": ("publish", "{:.4f}"),
    "prepare": ("prepare", "{:.4f}"),
    "stall": ("stall", "{:.4f}"),
    "serving": ("serving", "{:.3f}"),
    "bytes": ("bytes", "{:,.0f}"),
    "tokens/s": ("tokens_per_second", "{:.0f}"),
}
AIMS = {"bytes": 0.02, "stall": 1.0, "serving": 1.0}
"""Largest figures of an adapter over those of full weights, medians of rounds."""
LEAST_SPEED = 0.9
"""Smallest tokens/s with an adapter over those with full weights."""
WINDOW_SECONDS, TOKENS = 6.0, 20
"""Time in which tokens are counted, and length of the requests."""


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
    from benchmarks.weights.update_rounds import REQUESTS, WARM_UP, Bench

    full = Sending("shared_memory", wire=options.dtype)
    engine = await start_engine(folder / "model", initial_version=0, dtype=options.dtype)
    bench = Bench(engine, folder)
    raw: Record = {"full": {}, "adapter": {}}
    version = 0
    try:
        load = Load(engine, REQUESTS, TOKENS)
        async with (
            bench.updates(full) as whole,
            bench.updates(replace(full, rank=options.rank)) as adapter,
        ):
            for index in range(options.rounds + WARM_UP):
                for name, updates in {"full": whole, "adapter": adapter}.items():
                    updates.learner.version, version = version, version + 1
                    _, figures = await updates.measure()
                    tokens, begin = load.tokens, time.perf_counter()
                    await asyncio.sleep(WINDOW_SECONDS)
                    seconds = time.perf_counter() - begin
                    figures["tokens_per_second"] = (load.tokens - tokens) / seconds
                    print(f"{name}: round {index - WARM_UP + 1}, {figures['serving']:.3f} s")
                    for key, value in figures.items() if index >= WARM_UP else ():
                        raw[name].setdefault(key, []).append(value)
        await load.stop()
    finally:
        await engine.close()
    return {"raw": raw, "model_bytes": bench.bytes}


def conclude(record: Record) -> Record:
    if "raw" not in record:
        return {}
    raw, keys = record["raw"], [key for key, _ in FIGURES.values()]
    medians = {name: {key: median(figures[key]) for key in keys} for name, figures in raw.items()}
    pairs = {key: zip(raw["adapter"][key], raw["full"][key], strict=True) for key in keys}
    ratios = {key: median(own / full for own, full in pairs[key]) for key in keys}
    return {"medians": medians, "ratios": ratios}


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
    if ratios["tokens_per_second"] < LEAST_SPEED:
        missed.append(
            f"{ratios['tokens_per_second']:.3f} of the tokens/s, at least {LEAST_SPEED:g}"
        )
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
        option("--rounds", 9, "with an update of each kind", type=COUNT),
    ),
    file="lora_{time}.json",
    measure=measure,
    conclude=conclude,
    table=table,
    misses=misses,
)

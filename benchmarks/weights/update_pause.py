"""Duration of the stop of generation by a weight update.

    headway bench update-pause

With requests running throughout, each round measures vLLM's pause and resume with nothing in
between, the bare load of the same weights by vLLM's calls, and the whole in-flight swap. The figure
of merit, swap / (pause + 2 × load), must not exceed 1. Leaves out transfer between nodes.
"""

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from benchmarks.harness.study import Options, Record, Study, number, option
from benchmarks.harness.synthetic_load import SIZES
from benchmarks.weights.engine_load import (
    MAX_MODEL_LEN,
    Load,
    bare_load,
    build_model,
    empty_pause,
    qwen3_size,
    start_engine,
)
from benchmarks.weights.learner_process import LearnerProcess, Sending
from deploy.errors import RunFailed
from weight_sync.broadcaster import Broadcaster
from weight_sync.receive.receiver import Receiver
from weight_sync.transports.shared_memory import SharedMemoryTransport

REST_SECONDS = 0.3
REQUESTS = 64
"""Running throughout."""
WARM_UP_SECONDS = 3.0


def measure(options: Options) -> Iterator[Record]:
    size = SIZES.get(options.size) or qwen3_size(256, 4)
    with tempfile.TemporaryDirectory() as folder:
        yield {"parameters": build_model(Path(folder), size, options.dtype)}
        yield asyncio.run(measure_rounds(options, Path(folder)))


async def measure_rounds(options: Options, folder: Path) -> Record:
    """Update, pause and load again and again; the first round touches fresh memory."""
    engine = await start_engine(folder, dtype=options.dtype, requests=REQUESTS)
    raw: dict[str, list[float]] = {}
    transport = SharedMemoryTransport()
    receiver = Receiver("engine-0", engine, Broadcaster(1.0, 1), transport)
    learner = LearnerProcess(folder, folder / "weights", Sending("shared_memory"))
    try:
        await receiver.update(await learner.publish())
        await learner.seconds()
        load = Load(engine, REQUESTS)
        await asyncio.sleep(WARM_UP_SECONDS)
        for index in range(options.rounds + 1):
            manifest = await learner.publish()
            report = await receiver.update(manifest)
            publish_seconds = await learner.seconds()
            if report is None or report.staged_at is None or report.swap_finished_at is None:
                raise RunFailed(f"the update failed: {report and report.error}")
            figures = {
                "empty_pause": await empty_pause(engine),
                "bare_load": await bare_load(engine, manifest, transport),
                "swap": report.stalled_seconds,
                "swap_pause": report.pause_seconds,
                "swap_load": report.load_seconds,
                "swap_resume": report.resume_seconds,
                "publish_call": publish_seconds,
                "staging": report.staged_at - report.published_at,
                "publish_to_serving": report.swap_finished_at - report.published_at,
            }
            await asyncio.sleep(REST_SECONDS)
            for key, seconds in figures.items() if index else ():
                raw.setdefault(key, []).append(seconds)
        await load.stop()
        receiver.close()
        return {"raw_seconds": raw, "bytes": report.bytes, "requests_that_crossed": load.crossed}
    finally:
        learner.close()
        await engine.close()


def conclude(record: Record) -> Record:
    if "raw_seconds" not in record:
        return {}
    medians = {key: median(values) for key, values in record["raw_seconds"].items()}
    ratio = medians["swap"] / (medians["empty_pause"] + 2 * medians["bare_load"])
    return {"medians": medians, "ratio": ratio}


def table(record: Record) -> str:
    lines = [f"{record['parameters']:,} parameters, {record['bytes']:,} bytes, {REQUESTS} requests"]
    for key, values in record["raw_seconds"].items():
        lines.append(
            f"{key:20s} median {1e3 * median(values):8.1f} ms   "
            f"{1e3 * min(values):8.1f} … {1e3 * max(values):.1f}"
        )
    ratio = f"swap / (empty_pause + 2 × bare_load) = {record['ratio']:.2f}   (must be ≤ 1)"
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

if __name__ == "__main__":
    STUDY.main()

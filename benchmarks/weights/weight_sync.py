"""Weight updates of every transport and codec beside a memcpy and vLLM's own reload.

    headway bench weight-sync --megabytes 3

With requests running throughout: the learner's wait, the engine's preparation and stall, and the
time until it serves; then tokens/s with an update every second and with none, and with --faults the
recovery from faults. Leaves out other nodes and GPUs.
"""

import asyncio
import itertools
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from actors.engines.vllm import VllmEngine
from benchmarks.harness.study import Options, Record, Study, cells, number, option, text_table
from benchmarks.weights.engine_load import (
    Load,
    bare_load,
    build_model,
    empty_pause,
    qwen3_size,
    start_engine,
)
from benchmarks.weights.learner_process import LearnerProcess, Sending
from benchmarks.weights.weight_faults import measure_faults
from deploy.errors import RunFailed
from weight_sync.announcements import WeightUpdateReport
from weight_sync.broadcaster import Broadcaster
from weight_sync.manifest import Manifest
from weight_sync.receive.receiver import Receiver, ReceiverOptions
from weight_sync.transports.protocol import Transport

SHAPES = {3: (128, 3), 100: (512, 8), 1000: (1024, 20)}
"""Hidden size and layers of a Qwen3 with about so many megabytes of float32."""
REQUESTS = 16
"""Running throughout."""
WARM_UP_SECONDS, WINDOW_SECONDS = 3.0, 8.0
WINDOW_TOKENS = 50
"""Length of requests while tokens are counted, which is when they end."""
WARM_UP = 2
"""Updates that touch fresh memory, in either snapshot, and have no base for a delta."""
SENDINGS = (
    Sending("shared_memory"),
    Sending("shared_memory", "full", "bfloat16"),
    Sending("shared_memory", "delta"),
    Sending("filesystem"),
    Sending("filesystem", "delta"),
)


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


class Memcpy:
    """Warm copies by one thread."""

    def __init__(self, nbytes: int) -> None:
        self._source, self._target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
        self.seconds: list[float] = []

    def measure(self, times: int) -> None:
        """Copy some times; the first copy does not count."""
        for index in range(times + 1):
            begin = time.perf_counter()
            np.copyto(self._target, self._source)
            if index:
                self.seconds.append(time.perf_counter() - begin)


@dataclass(frozen=True)
class Updates:
    """A learner in another process and the receiver of an engine."""

    learner: LearnerProcess
    transport: Transport
    receiver: Receiver

    async def update(self) -> tuple[Manifest, WeightUpdateReport, float]:
        """Publish and load the next version; returns the seconds of `publish` too.

        Raises:
            RunFailed: The update failed.
        """
        manifest = await self.learner.publish()
        report = await self.receiver.update(manifest)
        seconds = await self.learner.seconds()
        if report is None or report.error:
            raise RunFailed(f"the update failed: {report and report.error}")
        return manifest, report, seconds


class Bench:
    """An engine that is updated by one sending after another."""

    def __init__(self, engine: VllmEngine, folder: Path) -> None:
        self.engine, self._folder = engine, folder
        self._version = 0
        self.bytes = (folder / "model" / "model.safetensors").stat().st_size
        self.memcpy = Memcpy(self.bytes)
        self.memcpy.measure(5)

    @asynccontextmanager
    async def updates(self, sending: Sending) -> AsyncIterator[Updates]:
        """Start a learner that sends in one way; it ends with the block."""
        weights = self._folder / "weights"
        learner = LearnerProcess(self._folder / "model", weights, sending, self._version)
        transport = sending.open(weights)
        receiver = Receiver(
            "e0",
            self.engine,
            Broadcaster(1.0, 1),
            transport,
            options=ReceiverOptions(keep_base=sending.codec == "delta", timeout=120),
        )
        try:
            yield Updates(learner, transport, receiver)
        finally:
            receiver.close()
            self._version = learner.version
            learner.close()
            shutil.rmtree(weights, ignore_errors=True)

    async def measure(self, sending: Sending, rounds: int) -> dict[str, list[Any]]:
        """Return the raw figures of some updates; the first two are not counted."""
        raw: dict[str, list[Any]] = {}
        async with self.updates(sending) as updates:
            for index in range(rounds + WARM_UP):
                manifest, report, publish_seconds = await updates.update()
                if index < WARM_UP:
                    continue
                assert report.staged_at is not None
                assert report.swap_finished_at is not None
                self.memcpy.measure(1)
                figures = {
                    "publish": publish_seconds,
                    "staging": report.staged_at - report.published_at,
                    "prepare": report.prepare_seconds,
                    "stall": report.stalled_seconds,
                    "pause": report.pause_seconds,
                    "load": report.load_seconds,
                    "resume": report.resume_seconds,
                    "serving": report.swap_finished_at - report.published_at,
                    "bytes": report.bytes,
                    "changed": report.changed,
                }
                if sending == SENDINGS[0]:
                    transport = updates.transport
                    figures["bare_load"] = await bare_load(self.engine, manifest, transport)
                    figures["empty_pause"] = await empty_pause(self.engine)
                for key, value in figures.items():
                    raw.setdefault(key, []).append(value)
                print(f"{sending}: {index - WARM_UP + 1} of {rounds}, {figures['serving']:.3f} s")
        return raw

    async def measure_loss(self, options: Options) -> dict[str, list[float]]:
        """Return tokens per second in windows without and with updates, and the share stalled."""
        rates: dict[str, list[float]] = {"without": [], "with": [], "stalled": [], "updates": []}
        async with self.updates(SENDINGS[0]) as updates:
            for _ in range(WARM_UP):
                await updates.update()
            load = Load(self.engine, REQUESTS, tokens=WINDOW_TOKENS)
            await asyncio.sleep(WARM_UP_SECONDS)
            kinds = itertools.cycle(("without", "with"))
            for kind in itertools.islice(kinds, 2 * options.windows):
                tokens, begin, stalls = load.tokens, time.perf_counter(), []
                while (elapsed := time.perf_counter() - begin) < WINDOW_SECONDS:
                    if kind == "with":
                        stalls.append((await updates.update())[1].stalled_seconds)
                    await asyncio.sleep(max(0.0, 1 - (time.perf_counter() - begin - elapsed)))
                rates[kind].append((load.tokens - tokens) / elapsed)
                print(f"{kind} updates: {rates[kind][-1]:.0f} tokens a second", flush=True)
                if kind == "with":
                    rates["stalled"].append(sum(stalls) / elapsed)
                    rates["updates"].append(len(stalls) / elapsed)
            await load.stop()
        return rates


async def measure_all(options: Options, folder: Path) -> Record:
    """Measure every sending, then the loss of tokens."""
    engine = await start_engine(folder / "model", initial_version=0)
    bench = Bench(engine, folder)
    raw: Record = {"bytes": bench.bytes, "memcpy": bench.memcpy.seconds, "ways": {}}
    load = Load(engine, REQUESTS)
    try:
        await asyncio.sleep(WARM_UP_SECONDS)
        for sending in SENDINGS[: options.ways]:
            raw["ways"][str(sending)] = await bench.measure(sending, options.rounds)
        await load.stop()
        if options.windows:
            raw["tokens_per_second"] = await bench.measure_loss(options)
    finally:
        await engine.close()
    return raw


def measure(options: Options) -> Iterator[Record]:
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
    memcpy, first = median(raw["memcpy"]), raw["ways"][str(SENDINGS[0])]
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
        option("--ways", len(SENDINGS), "only the first so many", type=COUNT),
        option("--windows", 4, "of each kind, for tokens a second", type=number(int, 0)),
        option("--faults", False, "also put faults in, on 3 MB", action="store_true"),
        option("--fault-rounds", 3, "times that each fault is put in", type=COUNT),
    ),
    file="weight_sync_{megabytes}mb_{time}.json",
    measure=measure,
    conclude=conclude,
    table=table,
)

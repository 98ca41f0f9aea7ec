"""Weight updates of every transport and codec beside a memcpy and vLLM's own reload.

    headway bench weight-sync --megabytes 3

With requests running throughout: the learner's wait, the engine's preparation and stall, and the
time until it serves; then tokens/s with an update every second and with none, and with --faults the
recovery from faults. The second node is Ray's, on this machine. Leaves out GPUs.
"""

import asyncio
import itertools
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from actors.engines.vllm import VllmEngine
from benchmarks.harness.study import Options, Record, Study, number, option, text_table
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
WINDOW_TOKENS = 50
"""Length of requests while tokens are counted, which is when they end."""
WARM_UP = 2
"""Updates that touch fresh memory, in either snapshot, and have no base for a delta."""
OTHER_NODE = "object_store_other_node"
SENDINGS = (
    Sending("shared_memory"),
    Sending("shared_memory", "full", "bfloat16"),
    Sending("shared_memory", "delta"),
    Sending("filesystem"),
    Sending("filesystem", "delta"),
    Sending("object_store"),
    Sending(OTHER_NODE),
    Sending(OTHER_NODE, "delta"),
    Sending(OTHER_NODE, "delta", "bfloat16"),
)


@contextmanager
def two_nodes(wanted: bool) -> Iterator[tuple[str | None, str | None]]:
    """Start a cluster of two nodes; return its address and the second node's name, or None."""
    if not wanted:
        yield None, None
        return
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    other = cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        yield cluster.address, other.node_id
    finally:
        ray.shutdown()
        cluster.shutdown()


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


class Updates:
    """A learner in another process and the receiver of an engine."""

    def __init__(
        self, engine: VllmEngine, learner: LearnerProcess, transport: Transport, *, delta: bool
    ) -> None:
        self._learner, self.transport = learner, transport
        options = ReceiverOptions(keep_base=delta, timeout=120)
        self.receiver = Receiver("e0", engine, Broadcaster(1.0, 1), transport, options=options)

    async def update(self) -> tuple[Manifest, WeightUpdateReport, float]:
        """Publish and load the next version; returns the seconds of `publish` too.

        Raises:
            RunFailed: The update failed.
        """
        manifest = await self._learner.publish()
        report = await self.receiver.update(manifest)
        seconds = await self._learner.seconds()
        if report is None or report.error:
            raise RunFailed(f"the update failed: {report and report.error}")
        return manifest, report, seconds


class Bench:
    """An engine that is updated in one way after another."""

    def __init__(self, engine: VllmEngine, folder: Path, other_node: str | None) -> None:
        self.engine, self._folder, self._other_node = engine, folder, other_node
        self._version = 0

    @asynccontextmanager
    async def updates(self, sending: Sending) -> AsyncIterator[Updates]:
        """Start a learner that sends in one way; it ends with the block."""
        weights = self._folder / "weights"
        learner = LearnerProcess(self._folder / "model", weights, sending, self._version)
        transport = sending.open(weights)
        if sending.transport == OTHER_NODE:
            transport.node = self._other_node  # type: ignore[attr-defined]
        updates = Updates(self.engine, learner, transport, delta=sending.codec == "delta")
        try:
            yield updates
        finally:
            updates.receiver.close()
            self._version = learner.version
            learner.close()
            shutil.rmtree(weights, ignore_errors=True)

    async def measure(self, sending: Sending, rounds: int, memcpy: Memcpy) -> dict[str, list[Any]]:
        """Return the raw figures of some updates; the first two are not counted."""
        raw: dict[str, list[Any]] = {}
        async with self.updates(sending) as updates:
            for index in range(rounds + WARM_UP):
                manifest, report, publish_seconds = await updates.update()
                if index < WARM_UP:
                    continue
                assert report.staged_at is not None
                assert report.swap_finished_at is not None
                memcpy.measure(1)
                figures = {
                    "publish": publish_seconds,
                    "staging": report.staged_at - report.published_at,
                    "prepare": report.prepare_seconds,
                    "stall": report.stalled_seconds,
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
            load = Load(self.engine, options.requests, tokens=WINDOW_TOKENS)
            await asyncio.sleep(options.warm_up)
            kinds = itertools.cycle(("without", "with"))
            for kind in itertools.islice(kinds, 2 * options.windows):
                tokens, begin, stalls = load.tokens, time.perf_counter(), []
                while (elapsed := time.perf_counter() - begin) < options.window_seconds:
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


async def measure_all(
    options: Options, folder: Path, address: str | None, other_node: str | None
) -> Record:
    """Measure every way of sending, then the loss of tokens."""
    engine = await start_engine(folder / "model", initial_version=0)
    nbytes = (folder / "model" / "model.safetensors").stat().st_size
    memcpy = Memcpy(nbytes)
    memcpy.measure(5)
    raw: Record = {"bytes": nbytes, "memcpy": memcpy.seconds, "ways": {}}
    bench = Bench(engine, folder, other_node)
    load = Load(engine, options.requests)
    try:
        await asyncio.sleep(options.warm_up)
        for sending in SENDINGS[: options.ways]:
            in_store = sending.transport.startswith("object")
            if in_store and address is None:
                continue
            placed = replace(sending, address=address) if in_store else sending
            raw["ways"][str(sending)] = await bench.measure(placed, options.rounds, memcpy)
        await load.stop()
        if options.windows:
            raw["tokens_per_second"] = await bench.measure_loss(options)
    finally:
        await engine.close()
    return raw


def measure(options: Options) -> Iterator[Record]:
    """Measure updates, and recovery from faults."""
    hidden, layers = SHAPES[options.megabytes]
    with tempfile.TemporaryDirectory() as scratch, two_nodes(not options.one_node) as nodes:
        folder = Path(scratch)
        for name in ("model", "small"):
            (folder / name).mkdir()
        build_model(folder / "model", qwen3_size(hidden, layers))
        raw = asyncio.run(measure_all(options, folder, *nodes))
        yield {"raw": raw}
        if options.faults:
            build_model(folder / "small", qwen3_size(*SHAPES[3]))
            print("from a fault until every engine serves the newest version again:")
            faults = measure_faults(folder / "small", folder / "faulty", options.fault_rounds)
            yield {"raw": raw | {"faults": asyncio.run(faults)}}


def conclude(record: Record) -> Record:
    """Return the medians, and the ratios that the aims are about."""
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
    """Return medians and ratios as a table."""
    raw, medians = record["raw"], record["medians"]
    title = (
        f"{raw['bytes']:,} bytes: memcpy {medians['memcpy']:.4f} s, vLLM's bare load "
        f"{medians['bare_load']:.3f} s, its empty pause {medians['empty_pause']:.4f} s"
    )
    head = ["seconds", "publish", "prepare", "stall", "serving", "bytes"]
    head += ["publish/memcpy", "stall/load", "serving/load+4memcpy"]
    rows = [[name, *_cells(medians[name])] for name in raw["ways"]]
    lines = [text_table(head, rows, title)]
    for fault, seconds in medians.get("recovery", {}).items():
        lines.append(f"{fault:30s} {seconds:7.2f} s to recover")
    if rates := medians.get("tokens_per_second"):
        lines.append(
            f"tokens a second: {rates['without']:.0f} without updates, {rates['with']:.0f} with "
            f"{rates['updates']:.2f} a second: {rates['lost']:.1%} lost, of which stalls are "
            f"{rates['stalled']:.1%}"
        )
    return "\n".join(lines)


def _cells(row: Mapping[str, float]) -> list[str]:
    seconds = [f"{row[key]:.4f}" for key in ("publish", "prepare", "stall", "serving")]
    ratios = ("publish_per_memcpy", "stall_per_load", "serving_per_load_and_4_memcpy")
    return [*seconds, f"{row['bytes']:,.0f}", *(f"{row[key]:.2f}" for key in ratios)]


COUNT = number(int, 1)
STUDY = Study(
    name="weight-sync",
    about=__doc__,
    options=(
        option("--megabytes", 3, "of the model", type=int, choices=sorted(SHAPES)),
        option("--requests", 16, "requests that run throughout", type=COUNT),
        option("--rounds", 5, "updates of each way that count", type=COUNT),
        option("--one-node", False, "leave Ray out", action="store_true"),
        option("--ways", len(SENDINGS), "only the first so many", type=COUNT),
        option("--windows", 4, "of each kind, for tokens a second", type=number(int, 0)),
        option("--window-seconds", 8.0, "of each window"),
        option("--faults", False, "also put faults in, on 3 MB", action="store_true"),
        option("--fault-rounds", 3, "times that each fault is put in", type=COUNT),
        option("--warm-up", 3.0, "seconds before measuring"),
    ),
    file="weight_sync_{megabytes}mb_{time}.json",
    measure=measure,
    conclude=conclude,
    table=table,
)

if __name__ == "__main__":
    STUDY.main()

"""Measures weight updates of every transport and codec beside a memcpy and vLLM's own reload.

In one run, with requests running throughout, for each way of sending:

- `publish`: what the learner waits,
- `prepare`: what the engine does beforehand, while it generates,
- `stall`: pause, load and resume together, while nothing is generated,
- `serving`: from the call of `publish` until the engine generates with the new weights,
- bytes that were fetched, and the share of elements that changed.

Beside them: a warm memcpy of the same bytes by one thread, before and between the updates, the
bare load of the same weights by vLLM's calls (its layerwise reload), and vLLM's pause and resume
with nothing in between. At last, in windows that take turns, the tokens a second with an update
every second and with none; what is lost beyond the stalls is what staging and preparing cost. With
--faults also the seconds that engines need to recover from what may go wrong (`weight_faults`).
The learner's side is another process. Every update changes one element in a hundred. The second
node is another node of Ray's on this machine: what crosses goes through two object stores, but over
no network. The load of the machine is stored with the figures: they mean little on a busy one.

    headway bench weight-sync --megabytes 3

Medians; raw numbers are stored under benchmarks/results/. Leaves out GPUs.
"""

import argparse
import asyncio
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from actors.engines.vllm import VllmEngine
from actors.engines.vllm_settings import VllmSettings
from benchmarks.harness.provenance import RESULTS, environment, reserve, store
from benchmarks.weights.update_pause import Load, build_model, empty_pause
from benchmarks.weights.weight_faults import measure_faults
from weight_sync.broadcaster import Broadcaster
from weight_sync.manifest import Manifest
from weight_sync.publish.staged_publisher import StagedPublisher
from weight_sync.receive.receiver import Receiver, ReceiverOptions
from weight_sync.receive.staging import stage
from weight_sync.transports.filesystem import FilesystemTransport
from weight_sync.transports.protocol import Transport
from weight_sync.transports.shared_memory import SharedMemoryTransport

SHAPES = {3: (128, 3), 100: (512, 8), 1000: (1024, 20)}
"""Hidden size and layers of a Qwen3 with about so many megabytes of float32."""
CHANGED = 0.01
TOKENS_OF_WINDOWS = 50
"""Of a request while tokens are counted, which is when it ends."""
WARM_UP = 2
"""Updates that touch fresh memory, in either snapshot, and have no base for a delta."""


@dataclass(frozen=True)
class Way:
    """One way to send."""

    transport: str
    codec: str = "full"
    wire: str = "float32"

    def __str__(self) -> str:
        return f"{self.transport} {self.codec} {self.wire}"


WAYS = [
    Way("shared_memory"),
    Way("shared_memory", "full", "bfloat16"),
    Way("shared_memory", "delta"),
    Way("filesystem"),
    Way("filesystem", "delta"),
    Way("object_store"),
    Way("object_store_other_node"),
    Way("object_store_other_node", "delta"),
    Way("object_store_other_node", "delta", "bfloat16"),
]


@contextmanager
def two_nodes(wanted: bool) -> Iterator[tuple[str | None, str | None]]:
    """Address of a cluster that this process is connected to, and its second node's name."""
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


def transport_of(way: Way, folder: Path) -> Transport:
    """The transport of one process."""
    if way.transport == "shared_memory":
        return SharedMemoryTransport()
    if way.transport == "filesystem":
        return FilesystemTransport(folder)
    from weight_sync.transports.ray_object_store import ObjectStoreTransport

    return ObjectStoreTransport()


class Memcpy:
    """Warm copies by one thread, taken now and then between updates."""

    def __init__(self, nbytes: int) -> None:
        self._source, self._target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
        self.seconds: list[float] = []
        """Of each."""

    def measure(self, times: int) -> None:
        """Copies some times, after once that does not count."""
        for number in range(times + 1):
            begin = time.perf_counter()
            np.copyto(self._target, self._source)
            if number:
                self.seconds.append(time.perf_counter() - begin)


def step(weights: dict[str, torch.Tensor]) -> None:
    """Changes one element in a hundred, in place."""
    for tensor in weights.values():
        flat = tensor.view(-1)
        count = max(1, int(CHANGED * flat.numel()))
        places = torch.randint(flat.numel(), (count,))
        flat[places] += 0.01 * torch.randn(count)


def publisher_process(
    pipe: Connection, model: Path, way: Way, folder: Path, address: str | None
) -> None:
    """The learner's side: a step and a `publish` for every version that the pipe asks for."""
    if address is not None:
        import ray

        ray.init(address=address, log_to_driver=False)
    weights = load_file(model / "model.safetensors")
    wire = torch.bfloat16 if way.wire == "bfloat16" else None
    sending = transport_of(way, folder)
    with StagedPublisher(
        sending,
        lambda manifest: pipe.send(manifest.to_json()),
        codec=way.codec,
        wire_dtype=wire,
    ) as publisher:
        while (version := pipe.recv()) is not None:
            step(weights)
            begin = time.perf_counter()
            publisher.publish(version, weights.items())
            seconds = time.perf_counter() - begin
            publisher.flush(120)
            pipe.send(seconds)


async def bare_load(engine: VllmEngine, manifest: Manifest, transport: Transport) -> float:
    """Seconds of vLLM's start, update and finish of a version that the engine has already."""
    staged = stage(manifest, transport)
    await engine.pause()
    begin = time.perf_counter()
    await engine.load(staged, manifest.version)
    seconds = time.perf_counter() - begin
    await engine.resume()
    staged.close()
    return seconds


async def measure_way(
    engine: VllmEngine,
    way: Way,
    versions: Iterator[int],
    rounds: int,
    pipe: Connection,
    receiving: Transport,
    memcpy: Memcpy,
) -> dict[str, list[Any]]:
    """Some updates from another process to the engine; the first two are not counted."""
    options = ReceiverOptions(keep_base=way.codec == "delta", timeout=120)
    receiver = Receiver("e0", engine, Broadcaster(1.0, 1), receiving, options=options)
    raw: dict[str, list[Any]] = {
        key: []
        for key in (
            *("publish", "staging", "prepare", "stall", "serving", "bytes", "changed"),
            *("bare_load", "empty_pause"),
        )
    }
    for number in range(rounds + WARM_UP):
        pipe.send(next(versions))
        manifest = Manifest.from_json(await asyncio.to_thread(pipe.recv))
        report = await receiver.update(manifest)
        publish = await asyncio.to_thread(pipe.recv)
        if report is None or report.staged_at is None or report.swap_finished_at is None:
            raise SystemExit(f"{way}: the update failed: {report and report.error}")
        if number < WARM_UP:
            continue
        serving = report.swap_finished_at - report.published_at
        memcpy.measure(1)
        print(f"{way}: update {number - WARM_UP + 1} of {rounds}, {serving:.3f} s", flush=True)
        raw["publish"].append(publish)
        raw["staging"].append(report.staged_at - report.published_at)
        raw["prepare"].append(report.prepare_seconds)
        raw["stall"].append(report.stalled_seconds)
        raw["serving"].append(serving)
        raw["bytes"].append(report.bytes)
        raw["changed"].append(report.changed)
        if way == WAYS[0]:
            raw["bare_load"].append(await bare_load(engine, manifest, receiving))
            raw["empty_pause"].append(await empty_pause(engine))
    receiver.close()
    return raw


async def measure_loss(
    engine: VllmEngine,
    arguments: argparse.Namespace,
    versions: Iterator[int],
    pipe: Connection,
    receiving: Transport,
) -> dict[str, list[float]]:
    """Tokens a second in windows without and with updates, and the share of the latter stalled."""
    options = ReceiverOptions(timeout=120)
    receiver = Receiver("e0", engine, Broadcaster(1.0, 1), receiving, options=options)

    async def update() -> float:
        pipe.send(next(versions))
        manifest = Manifest.from_json(await asyncio.to_thread(pipe.recv))
        report = await receiver.update(manifest)
        await asyncio.to_thread(pipe.recv)
        if report is None or report.error:
            raise SystemExit(f"the update failed: {report and report.error}")
        return report.stalled_seconds

    found: dict[str, list[float]] = {"without": [], "with": [], "stalled": [], "updates": []}
    for _ in range(WARM_UP):
        await update()
    load = Load(engine, arguments.requests, tokens=TOKENS_OF_WINDOWS)
    await asyncio.sleep(arguments.warm_up)
    for number in range(2 * arguments.windows):
        tokens, begin, stalls = load.tokens, time.perf_counter(), []
        while (elapsed := time.perf_counter() - begin) < arguments.window_seconds:
            if number % 2:
                stalls.append(await update())
            await asyncio.sleep(max(0.0, 1 - (time.perf_counter() - begin - elapsed)))
        kind, rate = "with" if number % 2 else "without", (load.tokens - tokens) / elapsed
        found[kind].append(rate)
        print(f"{kind} updates: {rate:.0f} tokens a second", flush=True)
        if number % 2:
            found["stalled"].append(sum(stalls) / elapsed)
            found["updates"].append(len(stalls) / elapsed)
    await load.stop()
    receiver.close()
    return found


async def measure(
    arguments: argparse.Namespace, folder: Path, nodes: tuple[str | None, str | None]
) -> dict[str, Any]:
    engine = VllmEngine(
        VllmSettings(
            str(folder / "model"),
            dtype="float32",
            max_model_len=512,
            max_num_seqs=64,
            cores=None,
            kv_cache_gib=1,
            initial_version=0,
        )
    )
    await engine.start()
    nbytes = (folder / "model" / "model.safetensors").stat().st_size
    versions = iter(range(1, 10_000))
    memcpy = Memcpy(nbytes)
    memcpy.measure(5)
    found: dict[str, Any] = {"bytes": nbytes, "memcpy": memcpy.seconds, "ways": {}}
    address, other_node = nodes
    load = Load(engine, arguments.requests)
    spawn = multiprocessing.get_context("spawn")
    try:
        await asyncio.sleep(arguments.warm_up)
        for way in [
            way
            for way in WAYS[: arguments.ways]
            if address or not way.transport.startswith("object")
        ]:
            mine, other = spawn.Pipe()
            learner = spawn.Process(
                target=publisher_process,
                args=(other, folder / "model", way, folder / "weights", address),
                daemon=True,
            )
            learner.start()
            receiving = transport_of(way, folder / "weights")
            if way.transport == "object_store_other_node":
                receiving.node = other_node  # type: ignore[attr-defined]
            found["ways"][str(way)] = await measure_way(
                engine, way, versions, arguments.rounds, mine, receiving, memcpy
            )
            mine.send(None)
            await asyncio.to_thread(learner.join, 60)
            shutil.rmtree(folder / "weights", ignore_errors=True)
        await load.stop()
        if arguments.windows:
            mine, other = spawn.Pipe()
            learner = spawn.Process(
                target=publisher_process,
                args=(other, folder / "model", WAYS[0], folder / "weights", None),
                daemon=True,
            )
            learner.start()
            found["tokens_per_second"] = await measure_loss(
                engine, arguments, versions, mine, SharedMemoryTransport()
            )
            mine.send(None)
            await asyncio.to_thread(learner.join, 60)
    finally:
        await engine.close()
    return found


def show(found: dict[str, Any]) -> dict[str, Any]:
    """Prints medians and the ratios that the aims are about; the same as data."""
    memcpy = statistics.median(found["memcpy"])
    first = found["ways"][str(WAYS[0])]
    bare, empty = (statistics.median(first[key]) for key in ("bare_load", "empty_pause"))
    print(
        f"{found['bytes']:,} bytes: memcpy {memcpy:.4f} s, vLLM's bare load {bare:.3f} s, "
        f"its empty pause {empty:.4f} s"
    )
    print(f"{'':40s} publish  prepare   stall  serving      bytes   publish/  stall/  serving/")
    print(f"{'':40s}       s        s       s        s              memcpy    load    load+4memcpy")
    medians: dict[str, Any] = {"memcpy": memcpy, "bare_load": bare, "empty_pause": empty}
    for way, raw in found["ways"].items():
        publish, prepare, stall, serving, nbytes = (
            statistics.median(raw[key])
            for key in ("publish", "prepare", "stall", "serving", "bytes")
        )
        ratios = publish / memcpy, stall / bare, serving / (bare + 4 * memcpy)
        medians[way] = {
            "publish": publish, "prepare": prepare, "stall": stall, "serving": serving,
            "bytes": nbytes,
            "publish_per_memcpy": ratios[0], "stall_per_load": ratios[1],
            "serving_per_load_and_4_memcpy": ratios[2],
        }  # fmt: skip
        print(
            f"{way:40s} {publish:7.4f}  {prepare:7.3f}  {stall:6.4f}  {serving:7.3f}"
            f"  {nbytes:12,.0f}  {ratios[0]:5.2f}  {ratios[1]:6.3f}  {ratios[2]:6.2f}"
        )
    if "faults" in found:
        medians["recovery"] = {
            fault: statistics.median(raw) for fault, raw in found["faults"].items()
        }
        print(f"{'fault':30s} seconds to recover")
        for fault, seconds in medians["recovery"].items():
            print(f"{fault:30s} {seconds:7.2f}")
    if "tokens_per_second" in found:
        rates = {key: statistics.median(raw) for key, raw in found["tokens_per_second"].items()}
        rates["lost"] = 1 - rates["with"] / rates["without"]
        rates["lost_beyond_stalls"] = rates["lost"] - rates["stalled"]
        medians["tokens_per_second"] = rates
        print(
            f"tokens a second: {rates['without']:.0f} without updates, {rates['with']:.0f} with "
            f"{rates['updates']:.2f} a second: {rates['lost']:.1%} lost, of which stalls are "
            f"{rates['stalled']:.1%}"
        )
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=3, choices=sorted(SHAPES))
    parser.add_argument("--requests", type=int, default=16, help="requests that run throughout")
    parser.add_argument("--rounds", type=int, default=5, help="updates of each way that count")
    parser.add_argument("--one-node", action="store_true", help="leave Ray out")
    parser.add_argument("--ways", type=int, default=len(WAYS), help="only the first so many")
    parser.add_argument("--fault-rounds", type=int, default=3, help="times that each is put in")
    parser.add_argument("--windows", type=int, default=4, help="of each kind, for tokens a second")
    parser.add_argument("--window-seconds", type=float, default=8.0)
    parser.add_argument("--faults", action="store_true", help="also put faults in, on 3 MB")
    parser.add_argument("--warm-up", type=float, default=3.0, help="seconds before measuring")
    arguments = parser.parse_args()
    file = RESULTS / f"weight_sync_{arguments.megabytes}mb_{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json"
    reserve(file)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    hidden, layers = SHAPES[arguments.megabytes]
    with tempfile.TemporaryDirectory() as scratch, two_nodes(not arguments.one_node) as nodes:
        folder = Path(scratch)
        (folder / "model").mkdir()
        build_model(folder / "model", hidden=hidden, layers=layers)
        found = asyncio.run(measure(arguments, folder, nodes))
        if arguments.faults:
            small = folder / "small"
            small.mkdir()
            build_model(small, hidden=SHAPES[3][0], layers=SHAPES[3][1])
            print("from a fault until every engine serves the newest version again:")
            found["faults"] = asyncio.run(
                measure_faults(small, folder / "faulty", arguments.fault_rounds)
            )
    medians = show(found)
    record = environment() | {"medians": medians, "raw": found, "arguments": vars(arguments)}
    store(record, file)


if __name__ == "__main__":
    main()

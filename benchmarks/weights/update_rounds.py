"""Rounds of weight updates of a vLLM engine under load, by transport and codec."""

import asyncio
import itertools
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from actors.engines.vllm import VllmEngine
from benchmarks.harness.study import Options, Record
from benchmarks.weights.engine_load import (
    Load,
    bare_load,
    empty_pause,
    start_engine,
)
from benchmarks.weights.learner_process import LearnerProcess, Sending
from deploy.errors import RunFailed
from weight_sync.announcements import WeightUpdateReport
from weight_sync.broadcaster import Broadcaster
from weight_sync.manifest import Manifest
from weight_sync.receive.receiver import Receiver, ReceiverOptions
from weight_sync.transports.protocol import Transport

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

    async def measure(self) -> tuple[Manifest, dict[str, Any]]:
        """Publish and load the next version; return it and the figures of the update."""
        manifest, report, publish_seconds = await self.update()
        assert report.staged_at is not None
        assert report.swap_finished_at is not None
        return manifest, {
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
            self._version = max(self._version, learner.version)
            learner.close()
            shutil.rmtree(weights, ignore_errors=True)

    async def measure(self, sending: Sending, rounds: int) -> dict[str, list[Any]]:
        """Return the raw figures of some updates; the first two are not counted."""
        raw: dict[str, list[Any]] = {}
        async with self.updates(sending) as updates:
            for index in range(rounds + WARM_UP):
                manifest, figures = await updates.measure()
                if index < WARM_UP:
                    continue
                self.memcpy.measure(1)
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

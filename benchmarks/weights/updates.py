"""Weight updates of a vLLM engine with requests running throughout, by way of sending."""

import asyncio
import itertools
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.engines.vllm import VllmEngine
from benchmarks.harness.record import Record
from benchmarks.harness.synthetic_load import Size, time_copies
from benchmarks.weights.engine_load import Load, bare_load, build_model, empty_pause, start_engine
from benchmarks.weights.learner_process import LearnerProcess
from benchmarks.weights.sending import FULL, Sending
from deploy.errors import RunFailed
from weight_sync.announcements import WeightUpdateReport
from weight_sync.broadcaster import Broadcaster
from weight_sync.manifest import Manifest
from weight_sync.receive.receiver import Receiver, ReceiverOptions
from weight_sync.transports.protocol import Transport

WARM_UP_SECONDS = 3.0
LOSS_SECONDS, LOSS_TOKENS = 8.0, 50
"""Window in which tokens are counted with and without updates, and length of its requests."""
WARM_UP = 2
"""Updates that touch fresh memory, in either snapshot, and have no base for a delta."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Updates that are measured."""

    size: Size
    dtype: str = "float32"
    rounds: int
    """Updates of each sending that count."""
    sendings: Sequence[Sequence[Sending]]
    """Ways of sending; those that stand together take turns."""
    requests: int = 16
    """Number of requests that run throughout."""
    request_tokens: int = 400
    count_seconds: float = 0.0
    """Time after each update in which tokens are counted."""
    loss_windows: int = 0
    """Windows in which tokens are counted with an update every second, and as many with none."""


@dataclass(frozen=True)
class Updates:
    """A learner in another process and the receiver of an engine."""

    learner: LearnerProcess
    transport: Transport
    receiver: Receiver

    async def update(self, version: int) -> tuple[Manifest, WeightUpdateReport, float]:
        """Publish and load a version; returns the seconds of `publish` too.

        Raises:
            RunFailed: The update failed.
        """
        manifest = await self.learner.publish(version)
        report = await self.receiver.update(manifest)
        seconds = await self.learner.seconds()
        if report is None or report.error:
            raise RunFailed(f"the update failed: {report and report.error}")
        return manifest, report, seconds


class Bench:
    """An engine under load that is updated by one sending after another."""

    def __init__(self, engine: VllmEngine, folder: Path, plan: Plan) -> None:
        self._engine, self._folder, self._plan = engine, folder, plan
        self._version = 0
        self.bytes = (folder / "model" / "model.safetensors").stat().st_size
        self.memcpy = time_copies(self.bytes, 5)

    @asynccontextmanager
    async def _sender(self, sending: Sending) -> AsyncIterator[Updates]:
        """Start a learner that sends in one way; it ends with the block."""
        weights = self._folder / sending.name
        learner = LearnerProcess(self._folder / "model", weights, sending)
        transport = sending.open(weights)
        receiver = Receiver(
            "e0",
            self._engine,
            Broadcaster(1.0, 1),
            transport,
            options=ReceiverOptions(keep_base=sending.codec == "delta", timeout=120),
        )
        try:
            yield Updates(learner, transport, receiver)
        finally:
            receiver.close()
            learner.close()
            shutil.rmtree(weights, ignore_errors=True)

    async def measure(self, sendings: Sequence[Sending], load: Load) -> Record:
        """Return the raw figures of updates by sendings that take turns."""
        raw: dict[str, dict[str, list[Any]]] = {sending.name: {} for sending in sendings}
        rounds = self._plan.rounds
        async with AsyncExitStack() as block:
            senders = [
                (sending, await block.enter_async_context(self._sender(sending)))
                for sending in sendings
            ]
            for index, (sending, sender) in itertools.product(range(rounds + WARM_UP), senders):
                figures = await self._measure(sending, sender, load)
                if index >= WARM_UP:
                    self.memcpy += time_copies(self.bytes, 1)
                    for key, value in figures.items():
                        raw[sending.name].setdefault(key, []).append(value)
                    done = f"{index - WARM_UP + 1} of {rounds}"
                    print(f"{sending.name}: {done}, {figures['serving']:.3f} s", flush=True)
        return raw

    async def _measure(self, sending: Sending, sender: Updates, load: Load) -> dict[str, Any]:
        """Return the figures of one update."""
        self._version += 1
        manifest, report, publish_seconds = await sender.update(self._version)
        assert report.staged_at is not None
        assert report.swap_finished_at is not None
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
        if sending == FULL:
            figures["bare_load"] = await bare_load(self._engine, manifest, sender.transport)
            figures["empty_pause"] = await empty_pause(self._engine)
        if seconds := self._plan.count_seconds:
            figures["tokens_per_second"] = await load.rate(seconds)
        return figures

    async def measure_loss(self) -> dict[str, list[float]]:
        """Return tokens per second in windows without and with updates, and the share stalled."""
        rates: dict[str, list[float]] = {"without": [], "with": [], "stalled": [], "updates": []}
        load = Load(self._engine, self._plan.requests, LOSS_TOKENS)
        async with self._sender(FULL) as sender:

            async def update() -> float:
                self._version += 1
                return (await sender.update(self._version))[1].stalled_seconds

            for _ in range(WARM_UP):
                await update()
            await asyncio.sleep(WARM_UP_SECONDS)
            kinds = itertools.cycle(("without", "with"))
            for kind in itertools.islice(kinds, 2 * self._plan.loss_windows):
                tokens, begin, stalls = load.tokens, time.perf_counter(), []
                while (elapsed := time.perf_counter() - begin) < LOSS_SECONDS:
                    if kind == "with":
                        stalls.append(await update())
                    await asyncio.sleep(max(0.0, 1 - (time.perf_counter() - begin - elapsed)))
                rates[kind].append((load.tokens - tokens) / elapsed)
                print(f"{kind} updates: {rates[kind][-1]:.0f} tokens a second", flush=True)
                if kind == "with":
                    rates["stalled"].append(sum(stalls) / elapsed)
                    rates["updates"].append(len(stalls) / elapsed)
            await load.stop()
        return rates


async def _measure(plan: Plan, folder: Path) -> Record:
    engine = await start_engine(
        folder / "model",
        initial_version=0,
        dtype=plan.dtype,
        max_concurrent_rollouts=max(plan.requests, 16),
    )
    bench = Bench(engine, folder, plan)
    raw: Record = {"bytes": bench.bytes, "memcpy": bench.memcpy, "ways": {}}
    try:
        load = Load(engine, plan.requests, plan.request_tokens)
        await asyncio.sleep(WARM_UP_SECONDS)
        for sendings in plan.sendings:
            raw["ways"] |= await bench.measure(sendings, load)
        await load.stop()
        if plan.loss_windows:
            raw["tokens_per_second"] = await bench.measure_loss()
    finally:
        await engine.close()
    return raw


def measure_updates(plan: Plan) -> Record:
    """Return the raw figures of all updates, and the number of parameters.

    `ways` has by name of a sending the values of each figure, in seconds, bytes and tokens/s;
    `memcpy` the seconds of copies of the model's `bytes`; `tokens_per_second` the loss by updates.
    """
    with tempfile.TemporaryDirectory() as scratch:
        parameters = build_model(Path(scratch) / "model", plan.size, plan.dtype)
        return {"parameters": parameters, **asyncio.run(_measure(plan, Path(scratch)))}

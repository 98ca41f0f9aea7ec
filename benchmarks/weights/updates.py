"""Weight updates of a vLLM engine with requests running throughout, by way of sending."""

import asyncio
import itertools
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from actors.engines.vllm import VllmEngine
from benchmarks.harness.record import Record
from benchmarks.harness.synthetic_load import time_copies
from benchmarks.weights.engine_load import Load, bare_load, build_model, empty_pause, start_engine
from benchmarks.weights.learner_process import LearnerProcess
from benchmarks.weights.sending import FULL, Sending, UpdatePlan
from deploy.errors import RunFailed
from weight_sync.announcements import WeightUpdateReport
from weight_sync.broadcaster import Broadcaster
from weight_sync.manifest import Manifest
from weight_sync.receive.receiver import Receiver, ReceiverOptions

WARM_UP_SECONDS = 3.0
LOSS_SECONDS, LOSS_TOKENS = 8.0, 50
"""Window in which tokens are counted with and without updates, and length of its requests."""
WARM_UP = 2
"""Updates that touch fresh memory, in either snapshot, and have no base for a delta."""


class Sender:
    """A learner in another process that sends in one way, and the receiver of an engine."""

    def __init__(self, engine: VllmEngine, folder: Path, sending: Sending) -> None:
        self._weights = folder / sending.name
        self._learner = LearnerProcess(folder / "model", self._weights, sending)
        self.transport = sending.open(self._weights)
        options = ReceiverOptions(keep_base=sending.codec == "delta", timeout=120)
        broadcaster = Broadcaster(1.0, 1)
        self._receiver = Receiver("e0", engine, broadcaster, self.transport, options=options)

    async def update(self, version: int) -> tuple[Manifest, WeightUpdateReport, float]:
        """Publish and load a version; return the seconds of `publish` too. Raises `RunFailed`."""
        manifest, seconds = await self._learner.publish(version)
        report = await self._receiver.update(manifest)
        if report is None or report.error:
            raise RunFailed(f"the update failed: {report and report.error}")
        return manifest, report, seconds

    def close(self) -> None:
        """End the learner, and remove what it has published."""
        self._receiver.close()
        self._learner.close()
        shutil.rmtree(self._weights, ignore_errors=True)


class Bench:
    """An engine under load that is updated by one sending after another."""

    def __init__(self, engine: VllmEngine, folder: Path, plan: UpdatePlan) -> None:
        self._engine, self._folder, self._plan = engine, folder, plan
        self._versions = itertools.count(1)
        self.bytes = (folder / "model" / "model.safetensors").stat().st_size
        self.memcpy = time_copies(self.bytes, 5)

    def _sender(self, sending: Sending) -> "closing[Sender]":
        return closing(Sender(self._engine, self._folder, sending))

    async def measure(self, sendings: Sequence[Sending], load: Load) -> Record:
        """Return the raw figures of updates by sendings that take turns."""
        raw: dict[str, dict[str, list[Any]]] = {sending.name: {} for sending in sendings}
        rounds = self._plan.rounds
        with ExitStack() as block:
            senders = [
                (sending, block.enter_context(self._sender(sending))) for sending in sendings
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

    async def _measure(self, sending: Sending, sender: Sender, load: Load) -> dict[str, Any]:
        """Return the figures of one update."""
        manifest, report, publish_seconds = await sender.update(next(self._versions))
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
        with self._sender(FULL) as sender:
            for _ in range(WARM_UP):
                await sender.update(next(self._versions))
            await asyncio.sleep(WARM_UP_SECONDS)
            kinds = itertools.cycle(("without", "with"))
            for kind in itertools.islice(kinds, 2 * self._plan.loss_windows):
                tokens, begin, stalls = load.tokens, time.perf_counter(), []
                while (elapsed := time.perf_counter() - begin) < LOSS_SECONDS:
                    if kind == "with":
                        _, report, _ = await sender.update(next(self._versions))
                        stalls.append(report.stalled_seconds)
                    await asyncio.sleep(max(0.0, 1 - (time.perf_counter() - begin - elapsed)))
                rates[kind].append((load.tokens - tokens) / elapsed)
                print(f"{kind} updates: {rates[kind][-1]:.0f} tokens a second", flush=True)
                if kind == "with":
                    rates["stalled"].append(sum(stalls) / elapsed)
                    rates["updates"].append(len(stalls) / elapsed)
            await load.stop()
        return rates


async def _measure(plan: UpdatePlan, folder: Path) -> Record:
    engine = await start_engine(folder / "model", plan.dtype, max(plan.requests, 16))
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


def measure_updates(plan: UpdatePlan) -> Record:
    """Return the raw figures of all updates, and the number of parameters.

    `ways` has by name of a sending the values of each figure, in seconds, bytes and tokens/s;
    `memcpy` the seconds of copies of the model's `bytes`; `tokens_per_second` the loss by updates.
    """
    with tempfile.TemporaryDirectory() as scratch:
        parameters = build_model(Path(scratch) / "model", plan.size, plan.dtype)
        return {"parameters": parameters, **asyncio.run(_measure(plan, Path(scratch)))}

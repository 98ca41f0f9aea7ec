"""Seconds from a fault of a weight update until every engine serves the newest version again.

Two engines follow a broadcaster, and a process publishes into a folder; each fault is put in while
both serve an older version. A part of `headway bench weight-sync --faults`.
"""

import asyncio
import json
import shutil
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from actors.engines.vllm import VllmEngine
from benchmarks.weights.engine_load import start_engine
from benchmarks.weights.learner_process import DEADLINE, LearnerProcess
from benchmarks.weights.sending import Sending
from deploy.errors import RunFailed
from headway.errors import HeadwayError
from weight_sync.broadcaster import Broadcaster
from weight_sync.errors import StagingError
from weight_sync.manifest import Manifest
from weight_sync.receive.receiver import Receiver, ReceiverOptions
from weight_sync.transports.filesystem import FilesystemTransport

ENGINES = 2
SENDING = Sending("filesystem", "delta", bucket_bytes=2**20)
PERMIT_SECONDS = 2.0
"""Lifetime of an unanswered permit; a recipe's is `weight_sync.timeout_seconds`."""


class FaultyEngine:
    """An engine with its receiver, as a rollout actor has them, that can be killed on cue."""

    def __init__(self, name: str, model: Path, folder: Path, broadcaster: Broadcaster) -> None:
        self._model, self._folder, self._broadcaster = model, folder, broadcaster
        self.name = name
        self.kill_at: str | None = None
        """Phase of its update at which the engine is killed: "staging" or "swap"."""
        self.killed: asyncio.Future[float] | None = None
        """The time of the kill."""

    async def start(self) -> None:
        """Start the engine and follow the versions."""
        before = set(psutil.Process().children(recursive=True))
        self.engine = await start_engine(self._model)
        self._processes = set(psutil.Process().children(recursive=True)) - before
        transport = FilesystemTransport(self._folder)
        self.receiver = Receiver(
            self.name,
            self.engine,
            self._broadcaster,
            transport,
            options=ReceiverOptions(keep_base=True, retry_seconds=0.2),
        )
        self._loop = asyncio.get_running_loop()
        _call_before(transport, "open", partial(self._enter, "staging"))
        _call_before(self.engine, "load", partial(self._enter, "swap"))
        self._stop = asyncio.Event()
        self._following = asyncio.create_task(self.receiver.run(self._stop))

    def _enter(self, phase: str) -> None:
        """Kill the engine if this is the phase; runs in a thread of the receiver, too."""
        if self.kill_at != phase:
            return
        self.kill_at = None
        for process in self._processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        assert self.killed is not None
        self._loop.call_soon_threadsafe(self.killed.set_result, time.perf_counter())
        raise StagingError(f"{self.name} was killed in {phase}")

    async def restart(self) -> None:
        """Replace the dead engine, as a supervisor does."""
        self._stop.set()
        self._following.cancel()
        await asyncio.gather(self._following, return_exceptions=True)
        self.receiver.close()
        self._closing = asyncio.create_task(_close_dead(self.engine))
        await self.start()

    async def close(self) -> None:
        """End the engine."""
        self._stop.set()
        await asyncio.wait({self._following}, timeout=5)
        await self.engine.close()


async def _close_dead(engine: VllmEngine) -> None:
    """End what is left of a killed engine, which takes vLLM a while."""
    with suppress(HeadwayError):
        await engine.close()


def _call_before(owner: Any, name: str, hook: Callable[[], None]) -> None:
    """Make a method of one object call a hook first."""
    method = getattr(owner, name)

    def hooked(*arguments: Any) -> Any:
        hook()
        return method(*arguments)

    setattr(owner, name, hooked)


async def _until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE):
        while not await condition():  # noqa: ASYNC110  (no event is set)
            await asyncio.sleep(0.005)


class Faults:
    """The faults, each from a state in which all engines serve the newest version.

    The method of a fault returns the time at which it was put in.
    """

    def __init__(self, model: Path, folder: Path) -> None:
        self.broadcaster = Broadcaster(0.25, ENGINES, permit_seconds=PERMIT_SECONDS)
        self.learner = LearnerProcess(model, folder, SENDING)
        self.engines = [
            FaultyEngine(f"e{index}", model, folder, self.broadcaster) for index in range(ENGINES)
        ]

    async def stored(self) -> Manifest:
        """Store another version without announcing it."""
        manifest = await self.learner.publish()
        await self.learner.seconds()
        return manifest

    async def publish(self) -> None:
        """Announce another version."""
        await self.broadcaster.announce(await self.stored())

    async def all_serve_newest(self) -> None:
        """Wait until every engine serves the newest version."""
        newest = self.learner.version

        async def served() -> bool:
            return all(engine.receiver.version == newest for engine in self.engines)

        await _until(served)

    async def damaged(self, damage: Callable[[Manifest], Manifest]) -> float:
        """Announce a damaged version; when all have refused it, the next one."""
        known = len(await self.broadcaster.reports(0))
        manifest = damage(await self.stored())
        begin = time.perf_counter()
        await self.broadcaster.announce(manifest)

        async def refused() -> bool:
            reports = await self.broadcaster.reports(known)
            return len({report.engine_id for report in reports if report.error}) == ENGINES

        await _until(refused)
        await self.publish()
        return begin

    async def engine_killed(self, phase: str) -> float:
        """Kill an engine in a phase of its update, and replace it."""
        engine = self.engines[0]
        engine.killed = asyncio.get_running_loop().create_future()
        engine.kill_at = phase
        await self.publish()
        begin = await asyncio.wait_for(engine.killed, DEADLINE)
        await engine.restart()
        return begin

    async def wrong_base(self) -> float:
        """Announce a delta on a version that no engine has."""
        served = self.learner.version
        await self.stored()
        manifest = await self.stored()
        if manifest.delta is None:
            raise RunFailed("the publisher sent no delta")
        delta = replace(manifest.delta, base_version=served)
        begin = time.perf_counter()
        await self.broadcaster.announce(replace(manifest, delta=delta))
        return begin

    async def publisher_killed(self) -> float:
        """Kill the publisher between two buckets."""
        await self.learner.publish_part()
        begin = time.perf_counter()
        self.learner.kill()
        await self.publish()
        return begin

    async def never_answers(self) -> float:
        """Hold the only permit."""
        begin = time.perf_counter()
        if not await self.broadcaster.acquire_swap("silent", 5.0):
            raise RunFailed("there was no permit to hold")
        await self.publish()
        return begin

    async def close(self) -> None:
        """End all processes."""
        self.learner.close()
        for engine in self.engines:
            await engine.close()


def corrupted(manifest: Manifest) -> Manifest:
    """Flip a bit of the last byte of every file."""
    for file in _files(manifest):
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    return manifest


def missing(manifest: Manifest) -> Manifest:
    for file in _files(manifest):
        file.unlink()
    return manifest


def wrong_shape(manifest: Manifest) -> Manifest:
    """Describe one matrix as a vector."""
    fields = json.loads(manifest.to_json())
    matrix = next(spec for spec in fields["tensors"] if len(spec["shape"]) == 2)
    matrix["shape"] = [matrix["shape"][0] * matrix["shape"][1]]
    return Manifest.from_json(json.dumps(fields))


def _files(manifest: Manifest) -> list[Path]:
    patches = manifest.delta.buckets if manifest.delta else ()
    return [Path(bucket.location) for bucket in (*manifest.buckets, *patches)]


async def measure_faults(model: Path, folder: Path, rounds: int) -> dict[str, list[float]]:
    """Return the seconds to recover from each fault, by its name.

    Raises:
        RunFailed: The engines did not recover.
    """
    faults = Faults(model, folder)
    cases: dict[str, Callable[[], Awaitable[float]]] = {
        "corrupted bucket": partial(faults.damaged, corrupted),
        "missing bucket": partial(faults.damaged, missing),
        "wrong shape": partial(faults.damaged, wrong_shape),
        "wrong base": faults.wrong_base,
        "receiver never answers": faults.never_answers,
        "publisher killed": faults.publisher_killed,
        "receiver killed in staging": partial(faults.engine_killed, "staging"),
        "receiver killed in the swap": partial(faults.engine_killed, "swap"),
    }
    seconds: dict[str, list[float]] = {}
    try:
        for engine in faults.engines:
            await engine.start()
        for name, fault in cases.items():
            for _ in range(rounds):
                for _ in range(2):  # so that there is a base for a delta
                    await faults.publish()
                    await faults.all_serve_newest()
                begin = await fault()
                await faults.all_serve_newest()
                seconds.setdefault(name, []).append(time.perf_counter() - begin)
                print(f"{name:30s} {seconds[name][-1]:7.2f} s", flush=True)
    except (HeadwayError, TimeoutError) as error:
        raise RunFailed(f"the engines did not recover: {error}") from error
    finally:
        await faults.close()
        shutil.rmtree(folder, ignore_errors=True)
    return seconds

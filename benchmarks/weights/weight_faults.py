"""What goes wrong with an update, and how long until every engine serves the newest version again.

Two engines follow a broadcaster; a learner's side in another process publishes into a folder. Each
fault is put in while both serve an older version, and the clock runs from the fault until both
serve the newest one:

- a corrupted or missing bucket, or a wrong shape: refused by all, then the next version is
  published;
- a delta on a wrong base: the same version comes whole;
- an engine whose processes are killed while it stages, or while it swaps: made again and seeded;
- a publisher killed between two buckets: made again, and publishes;
- a receiver that holds the only permit and never answers: until the permit expires.

A part of `headway bench weight-sync --faults`. Leaves out what the faults do to the weights, which
`tests/weight_sync/receive/test_faults.py` asserts.
"""

import asyncio
import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

from actors.engines.vllm import VllmEngine
from actors.engines.vllm_settings import VllmSettings
from actors.errors import ActorsError
from weight_sync.announcements import WeightUpdateReport
from weight_sync.broadcaster import Broadcaster
from weight_sync.errors import StagingError, WeightSyncError
from weight_sync.manifest import Manifest
from weight_sync.publish.staged_publisher import StagedPublisher
from weight_sync.receive.receiver import Receiver, ReceiverOptions
from weight_sync.transports.filesystem import FilesystemTransport

ENGINES = 2
BUCKET_BYTES = 2**20
PERMIT_SECONDS = 2.0
"""Of a holder that says nothing; a recipe's is `weight_sync.timeout_seconds`."""
DEADLINE = 180.0


class HangingTransport(FilesystemTransport):
    """Hangs before the second bucket of a version that is to be cut off."""

    cut_off: int | None = None
    pipe: Connection

    def write(self, version: int, nbytes: int, pieces: Any) -> Any:
        """See `Transport.write`."""
        if version == self.cut_off and version in self._written:
            self.pipe.send("in the middle")
            time.sleep(DEADLINE)
        return super().write(version, nbytes, pieces)


def publisher_process(pipe: Connection, model: Path, folder: Path) -> None:
    """The learner's side: publishes the versions that are asked for, or a part where one is cut."""
    weights = load_file(model / "model.safetensors")
    transport = HangingTransport(folder)
    transport.pipe = pipe
    with StagedPublisher(
        transport, lambda manifest: pipe.send(manifest.to_json()), BUCKET_BYTES, codec="delta"
    ) as publisher:
        while (asked := pipe.recv()) is not None:
            version, cut_off = asked
            transport.cut_off = version if cut_off else None
            for tensor in weights.values():
                flat = tensor.view(-1)
                flat[:: 2**7] += 1e-3 * torch.randn_like(flat[:: 2**7])
            publisher.publish(version, weights.items())
            publisher.flush(DEADLINE)


class Learner:
    """The publisher's process, made again after it was killed."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._arguments = model, folder
        self.version = -1
        self._start()

    def _start(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, other = spawn.Pipe()
        self._process = spawn.Process(
            target=publisher_process, args=(other, *self._arguments), daemon=True
        )
        self._process.start()

    async def publish(self, *, cut_off: bool = False) -> Any:
        """Stores the next version; its manifest, or a word once it is cut off."""
        self.version += 1
        self._pipe.send((self.version, cut_off))
        said = await asyncio.to_thread(self._pipe.recv)
        return said if cut_off else Manifest.from_json(said)

    def kill(self) -> None:
        """SIGKILL, and another one in its place."""
        self._process.kill()
        self._process.join()
        self._start()

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.join()


class Actor:
    """An engine with its receiver, as a rollout actor has them."""

    def __init__(self, name: str, model: Path, folder: Path, broadcaster: Broadcaster) -> None:
        self._parts = model, folder, broadcaster
        self.name = name
        self.moment: tuple[str, Callable[[], None]] | None = None
        """Where it is to be killed next, and what is told then."""

    async def start(self) -> None:
        """Starts the engine and follows the versions."""
        model, folder, broadcaster = self._parts
        before = set(psutil.Process().children(recursive=True))
        self.engine = VllmEngine(
            VllmSettings(str(model), dtype="float32", max_model_len=512, cores=None, kv_cache_gib=1)
        )
        await self.engine.start()
        self._processes = set(psutil.Process().children(recursive=True)) - before
        transport = FilesystemTransport(folder)
        self.receiver = Receiver(
            self.name,
            self.engine,
            broadcaster,
            transport,
            options=ReceiverOptions(keep_base=True, retry_seconds=0.2),
        )
        _before(transport, "open", lambda: self._reached("staging"))
        _before(self.engine, "load", lambda: self._reached("swap"))
        self._stop = asyncio.Event()
        self._following = asyncio.create_task(self.receiver.run(self._stop))

    def _reached(self, moment: str) -> None:
        if self.moment is not None and self.moment[0] == moment:
            (_, told), self.moment = self.moment, None
            for process in self._processes:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
            told()
            raise StagingError(f"{self.name} was killed in {moment}")

    async def start_again(self) -> None:
        """What a supervisor does when it has died."""
        self._stop.set()
        self._following.cancel()
        await asyncio.gather(self._following, return_exceptions=True)
        self.receiver.close()
        self._closing = asyncio.create_task(_closed(self.engine))
        await self.start()

    async def close(self) -> None:
        """Ends it."""
        self._stop.set()
        await asyncio.wait({self._following}, timeout=5)
        await self.engine.close()


async def _closed(engine: VllmEngine) -> None:
    """Ends what is left of an engine, which takes vLLM a while."""
    with suppress(ActorsError):
        await engine.close()


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE):
        while not condition():  # noqa: ASYNC110  (nobody tells)
            await asyncio.sleep(0.005)


def _before(owner: Any, name: str, hook: Callable[[], None]) -> None:
    """Has a method of one object call a hook first."""
    method = getattr(owner, name)

    def hooked(*arguments: Any) -> Any:
        hook()
        return method(*arguments)

    setattr(owner, name, hooked)


class Faults:
    """The faults, each from a state in which all engines serve the newest version."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.broadcaster = Broadcaster(0.25, ENGINES, permit_seconds=PERMIT_SECONDS)
        self.learner = Learner(model, folder)
        self.actors = [
            Actor(f"e{number}", model, folder, self.broadcaster) for number in range(ENGINES)
        ]

    async def healthy(self) -> None:
        """Another version, and all engines serve it."""
        await self.broadcaster.announce(await self.learner.publish())
        await self.all_serve_newest()

    async def all_serve_newest(self) -> None:
        """Waits for every engine.

        Raises:
            TimeoutError: One does not serve it in time.
        """
        newest = self.learner.version
        await _until(lambda: all(actor.receiver.version == newest for actor in self.actors))

    async def refused(self, damage: Callable[[Manifest], Manifest]) -> float:
        """A damaged version, refused by all engines, and the next one; when it was announced."""
        reports: list[WeightUpdateReport] = self.broadcaster._reports
        known = len(reports)
        manifest = damage(await self.learner.publish())
        begin = time.perf_counter()
        await self.broadcaster.announce(manifest)
        await _until(lambda: len({r.engine_id for r in reports[known:] if r.error}) == ENGINES)
        await self.broadcaster.announce(await self.learner.publish())
        return begin

    async def killed(self, moment: str) -> float:
        """An engine that dies in a moment of its update; when it died."""
        victim, died = self.actors[0], asyncio.Event()
        loop, at = asyncio.get_running_loop(), 0.0

        def told() -> None:
            nonlocal at
            at = time.perf_counter()
            loop.call_soon_threadsafe(died.set)

        victim.moment = moment, told
        await self.broadcaster.announce(await self.learner.publish())
        await asyncio.wait_for(died.wait(), DEADLINE)
        await victim.start_again()
        return at

    async def wrong_base(self) -> float:
        """Deltas on a version that no engine has; when they were announced."""
        served = self.learner.version
        await self.learner.publish()
        manifest = await self.learner.publish()
        if manifest.delta is None:
            raise SystemExit("no delta came to be")
        delta = replace(manifest.delta, base_version=served)
        begin = time.perf_counter()
        await self.broadcaster.announce(replace(manifest, delta=delta))
        return begin

    async def publisher_killed(self) -> float:
        """A publisher that dies between two buckets; when it died."""
        await self.learner.publish(cut_off=True)
        begin = time.perf_counter()
        self.learner.kill()
        await self.broadcaster.announce(await self.learner.publish())
        return begin

    async def never_answers(self) -> float:
        """A permit whose holder is silent; when it got it."""
        begin = time.perf_counter()
        if not await self.broadcaster.acquire_swap("silent", 5.0):
            raise SystemExit("there was no permit to hold")
        await self.broadcaster.announce(await self.learner.publish())
        return begin

    async def close(self) -> None:
        """Ends all processes."""
        self.learner.close()
        for actor in self.actors:
            await actor.close()


def corrupted(manifest: Manifest) -> Manifest:
    """Flips a bit of the last byte of every file."""
    for file in _files(manifest):
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    return manifest


def missing(manifest: Manifest) -> Manifest:
    """Removes every file."""
    for file in _files(manifest):
        file.unlink()
    return manifest


def wrong_shape(manifest: Manifest) -> Manifest:
    """Says of a tensor that it is flat."""
    fields = json.loads(manifest.to_json())
    matrix = next(spec for spec in fields["tensors"] if len(spec["shape"]) == 2)
    matrix["shape"] = [matrix["shape"][0] * matrix["shape"][1]]
    return Manifest.from_json(json.dumps(fields))


def _files(manifest: Manifest) -> list[Path]:
    patches = manifest.delta.buckets if manifest.delta else ()
    return [Path(bucket.location) for bucket in (*manifest.buckets, *patches)]


async def measure_faults(model: Path, folder: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds from each fault until every engine serves the newest version again.

    Args:
        model: A model folder.
        folder: For the weights; made and removed.
        rounds: How often each fault is put in.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    faults = Faults(model, folder)
    cases: dict[str, Callable[[], Awaitable[float]]] = {
        "corrupted bucket": lambda: faults.refused(corrupted),
        "missing bucket": lambda: faults.refused(missing),
        "wrong shape": lambda: faults.refused(wrong_shape),
        "wrong base": faults.wrong_base,
        "receiver never answers": faults.never_answers,
        "publisher killed": faults.publisher_killed,
        "receiver killed in staging": lambda: faults.killed("staging"),
        "receiver killed in the swap": lambda: faults.killed("swap"),
    }
    found: dict[str, list[float]] = {}
    try:
        for actor in faults.actors:
            await actor.start()
        for name, fault in cases.items():
            for _ in range(rounds):
                await faults.healthy()
                await faults.healthy()  # so that there is a base for a delta
                begin = await fault()
                await faults.all_serve_newest()
                found.setdefault(name, []).append(time.perf_counter() - begin)
                print(f"{name:30s} {found[name][-1]:7.2f} s", flush=True)
    except (WeightSyncError, TimeoutError) as error:
        raise SystemExit(f"the engines did not recover: {error}") from error
    finally:
        await faults.close()
        shutil.rmtree(folder, ignore_errors=True)
    return found

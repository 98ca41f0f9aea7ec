"""Killed and hanging processes: never mixed weights, never a wait without an end."""

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.weight_sync.serving import newest_version
from weight_sync.adapter import A, AdapterForm, B, factor_name
from weight_sync.broadcaster import Broadcaster
from weight_sync.checksum import checksum
from weight_sync.errors import DeadlineExceeded
from weight_sync.manifest import Manifest
from weight_sync.publish.staged_publisher import StagedPublisher
from weight_sync.receive.receiver import Receiver, ReceiverOptions
from weight_sync.transports.filesystem import FilesystemTransport

SERVING = Path(__file__).parents[1] / "serving.py"
RECOVERY_SECONDS = 60.0
"""Far more than a restart needs; most of that is the import of torch."""

PUBLISHER = """
import sys, time, torch
from pathlib import Path
from weight_sync.adapter import AdapterForm
from weight_sync.publish.staged_publisher import StagedPublisher
from weight_sync.transports.filesystem import FilesystemTransport

class Slow(FilesystemTransport):
    written = 0
    def write(self, version, nbytes, pieces):
        self.written += 1
        if self.written == {hang_at}:
            print("in the middle", flush=True)
            time.sleep(600)
        return super().write(version, nbytes, pieces)

publisher = StagedPublisher(Slow(Path(sys.argv[1])), lambda manifest: None, 4096)
for version in ({versions}):
    generator = torch.Generator().manual_seed(version)
    tensors = [(name, torch.randn(32, 32, generator=generator)) for name in {names}]
    publisher.publish(version, tensors, {adapter})
    publisher.flush(600)
"""
FACTORS = tuple(factor_name(f"{layer}.weight", kind) for layer in ("q", "k") for kind in (A, B))
KINDS = pytest.mark.parametrize(
    ("names", "adapter"),
    [(tuple("abcd"), None), pytest.param(FACTORS, AdapterForm(scale=0.5), marks=pytest.mark.slow)],
    ids=["weights", "adapter"],
)
"""Names of tensors, and the adapter whose factors they are."""


def make_version(seed: int, names: tuple[str, ...]) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(name, torch.randn(32, 32, generator=generator)) for name in names]


def publish(
    folder: Path, version: int, names: tuple[str, ...], adapter: AdapterForm | None
) -> None:
    with StagedPublisher(FilesystemTransport(folder), lambda manifest: None, 4096) as publisher:
        publisher.publish(version, make_version(version, names), adapter)
        publisher.flush(30)


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen]]:
    """Return a function that starts programs, which end with the test."""
    running: list[subprocess.Popen] = []

    def run(*arguments: str) -> subprocess.Popen:
        process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)
        running.append(process)
        return process

    yield run
    for process in running:
        process.kill()
        process.wait(30)
        process.stdout.close()


def wait_for(condition: Callable[[], object], seconds: float = RECOVERY_SECONDS) -> float:
    """Return the seconds until a condition holds; fail at a deadline."""
    begin, pause = time.monotonic(), threading.Event()
    while not condition():
        assert time.monotonic() - begin < seconds, "it never came true"
        pause.wait(0.01)
    return time.monotonic() - begin


def lines(state: Path) -> list[str]:
    return state.read_text().splitlines() if state.exists() else []


def swapped(version: int, names: tuple[str, ...]) -> list[str]:
    """Return the lines that a whole swap appends to the log of an engine."""
    digest = checksum(make_version(version, names))
    return ["pause", f"loading {version}", f"loaded {version} {digest}", "resume"]


@KINDS
@pytest.mark.parametrize(("fault", "last"), [("slow-open", "staging"), ("slow-load", "loading 0")])
def test_a_receiver_killed_in_the_middle_is_seeded_with_the_newest_version(
    start, tmp_path, fault: str, last: str, names, adapter
) -> None:
    folder, state, again = tmp_path / "weights", tmp_path / "killed", tmp_path / "again"
    publish(folder, 0, names, adapter)
    victim = start(str(SERVING), str(folder), str(state), fault)
    wait_for(lambda: lines(state)[-1:] == [last])
    victim.send_signal(signal.SIGKILL)
    victim.wait(30)
    assert not [line for line in lines(state) if line.startswith(("loaded", "resume"))]
    publish(folder, 3, names, adapter)
    start(str(SERVING), str(folder), str(again))
    seconds = wait_for(lambda: lines(again)[-1:] == ["resume"])
    assert lines(again) == swapped(3, names)
    print(f"recovered in {seconds:.2f} s")


@KINDS
@pytest.mark.parametrize("hang_at", [6, 8])
def test_a_publisher_killed_in_the_middle_leaves_the_version_before(
    start, tmp_path, hang_at: int, names, adapter
) -> None:
    folder, state = tmp_path / "weights", tmp_path / "state"
    code = PUBLISHER.format(hang_at=hang_at, versions="4, 5", names=names, adapter=adapter)
    publisher = start("-c", code, str(folder))
    assert publisher.stdout.readline() == "in the middle\n"
    publisher.send_signal(signal.SIGKILL)
    publisher.wait(30)
    assert newest_version(folder).version == 4
    start(str(SERVING), str(folder), str(state))
    wait_for(lambda: lines(state)[-1:] == ["resume"])
    begin = time.monotonic()
    publish(folder, 5, names, adapter)
    wait_for(lambda: len(lines(state)) == 8)
    print(f"recovered in {time.monotonic() - begin:.2f} s")
    assert lines(state) == swapped(4, names) + swapped(5, names)
    assert [entry.name[:8] for entry in folder.iterdir()] == ["00000005"]


def test_a_receiver_that_never_answers_holds_nobody_up(transport, engine, published) -> None:
    """It holds the only permit and stays silent: the permit expires."""

    async def run() -> tuple[float, int | None]:
        broadcaster = Broadcaster(0.25, 4, permit_seconds=0.2)
        await broadcaster.announce(published(0))
        assert await broadcaster.acquire_swap("silent", 0.0)
        receiver = Receiver("e1", engine, broadcaster, transport)
        begin = time.monotonic()
        async with asyncio.timeout(10):
            await receiver.update(await broadcaster.newest(-1, 1.0))
        return time.monotonic() - begin, receiver.version

    seconds, version = asyncio.run(run())
    assert (version, engine.events) == (0, ["pause", "load 0", "resume"])
    assert 0.1 < seconds < 5


def test_an_engine_that_never_answers_is_named_and_its_permit_given_back(
    engine, transport, published
) -> None:
    async def run():
        engine.hold = asyncio.Event()
        broadcaster = Broadcaster(1.0, 1)
        receiver = Receiver(
            "e0", engine, broadcaster, transport, options=ReceiverOptions(timeout=0.1)
        )
        with pytest.raises(DeadlineExceeded, match=r"e0 did not take version 0 within 0\.1 s"):
            await receiver.update(published(0))
        assert await broadcaster.acquire_swap("e1", 0.0)
        assert receiver.version is None
        return engine.events

    assert asyncio.run(run()) == ["pause", "load 0"]


@pytest.mark.parametrize("codec", ["full", "delta"])
@pytest.mark.parametrize("fault", ["corrupted", "missing", "wrong shape"])
def test_a_version_with_a_fault_is_skipped_and_the_next_one_taken(
    engine, tmp_path, weights, fault: str, codec: str
) -> None:
    """The old version is served until then, by an engine that was not touched."""
    transport, manifests = FilesystemTransport(tmp_path / "weights"), []
    publisher = StagedPublisher(transport, manifests.append, 1024, codec=codec)

    def send(version: int, seed: int) -> Manifest:
        publisher.publish(version, weights(seed).items())
        publisher.flush(30)
        return manifests[-1]

    def damage(manifest: Manifest) -> Manifest:
        buckets = (*manifest.buckets, *(manifest.delta.buckets if manifest.delta else ()))
        if fault == "wrong shape":
            fields = json.loads(manifest.to_json())
            fields["tensors"][1]["shape"] = [49]
            return Manifest.from_json(json.dumps(fields))
        for bucket in buckets:
            file = Path(bucket.location)
            if fault == "missing":
                file.unlink()
            else:
                content = bytearray(file.read_bytes())
                content[-1] ^= 1
                file.write_bytes(content)
        return manifest

    async def run():
        options = ReceiverOptions(keep_base=codec == "delta")
        receiver = Receiver("e0", engine, Broadcaster(1.0, 1), transport, options=options)
        await receiver.update(send(0, 0))
        refused = await receiver.update(damage(send(1, 0)))
        assert receiver.version == 0
        begin = time.monotonic()
        taken = await receiver.update(send(2, 2))
        receiver.close()
        return refused, taken, time.monotonic() - begin

    refused, taken, seconds = asyncio.run(run())
    assert refused.error.startswith(
        "IncompatibleWeights" if fault == "wrong shape" else "StagingError"
    )
    assert refused.swap_started_at is None
    assert (taken.error, taken.codec) == (None, "full")
    assert engine.events == ["pause", "load 0", "resume", "pause", "load 2", "resume"]
    assert all(torch.equal(engine.weights[name], w) for name, w in weights(2).items())
    print(f"recovered in {seconds:.2f} s")
    publisher.close()

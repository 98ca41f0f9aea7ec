"""Small models, an engine that records its calls, and a publisher in the process of the test."""

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from weight_sync.adapter import AdapterForm
from weight_sync.broadcaster import Broadcaster
from weight_sync.direct.direct_receiver import DirectReceiver
from weight_sync.errors import LoadFailed
from weight_sync.manifest import Manifest
from weight_sync.publish.staged_publisher import StagedPublisher
from weight_sync.receive.receiver import Receiver, ReceiverOptions
from weight_sync.receive.staging import StagedWeights
from weight_sync.transports.protocol import Transport
from weight_sync.transports.shared_memory import SharedMemoryTransport

sys.path.insert(0, str(Path(__file__).parent))


def make_weights(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Return five tensors of odd sizes, a scalar among them."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed": (31, 7), "q": (7, 7), "scale": (), "norm": (7,), "head": (3, 31, 5)}
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()
    }


class RecordingEngine:
    """Keeps its weights and every call; fails the next loads on demand."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.failing_loads = 0
        self.error: Exception | None = None
        self.hold: asyncio.Event | None = None
        self.prepared: list[int] = []
        self.preparing: asyncio.Event | None = None

    async def prepare(self, weights: StagedWeights) -> None:
        self.prepared.append(weights.manifest.version)
        if self.preparing is not None:
            await self.preparing.wait()

    async def pause(self) -> None:
        self.events.append("pause")

    async def load(self, weights: StagedWeights, version: int) -> None:
        self.events.append(f"load {version}")
        if self.hold is not None:
            await self.hold.wait()
        if self.error is not None:
            raise self.error
        if self.failing_loads:
            self.failing_loads -= 1
            raise LoadFailed("injected")
        self.weights = {name: tensor.clone() for name, tensor in weights.tensors()}

    async def resume(self) -> None:
        self.events.append("resume")


class Sender(StagedPublisher):
    """A publisher that waits until a version is announced, and returns its manifest."""

    def __init__(self, transport: Transport, bucket_bytes: int = 1024, **options: Any) -> None:
        self.manifests: list[Manifest] = []
        super().__init__(transport, self.manifests.append, bucket_bytes, **options)

    def send(
        self, version: int, tensors: Mapping[str, Any], adapter: AdapterForm | None = None
    ) -> Manifest:
        self.publish(version, tensors.items(), adapter)
        self.flush(60)
        return self.manifests[-1]


class ReceiverLink:
    """A receiver in the event loop of another thread, whose calls block (an `EngineLink`)."""

    def __init__(
        self, engine_id: str, receiver: DirectReceiver, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.engine_id, self.workers = engine_id, 1
        self._receiver, self._loop = receiver, loop

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            answer = getattr(self._receiver, method)(*arguments)
            return asyncio.run_coroutine_threadsafe(answer, self._loop).result(120)

        return call


@pytest.fixture
def engine() -> RecordingEngine:
    return RecordingEngine()


@pytest.fixture
def transport() -> Iterator[SharedMemoryTransport]:
    transport = SharedMemoryTransport()
    yield transport
    transport.close()


@pytest.fixture
def weights() -> Callable[..., dict[str, torch.Tensor]]:
    return make_weights


@pytest.fixture
def published(transport: SharedMemoryTransport) -> Callable[..., Manifest]:
    """Return a function that publishes a version of `make_weights` and returns its manifest."""
    sender = Sender(transport)
    return lambda version: sender.send(version, make_weights(version))


@pytest.fixture
def broadcaster() -> Broadcaster:
    return Broadcaster(1.0, 1)


@pytest.fixture
def receiver_of(
    engine: RecordingEngine, transport: SharedMemoryTransport, broadcaster: Broadcaster
) -> Callable[..., Receiver]:
    """Return a function that makes a receiver of the engine, with options."""

    def make(
        by: Any = transport, to: Any = engine, on_version: Any = None, **options: Any
    ) -> Receiver:
        return Receiver("e0", to, broadcaster, by, on_version, ReceiverOptions(**options))

    return make


def same(tensors: Any, expected: Mapping[str, torch.Tensor]) -> bool:
    """Return True if named tensors are those expected, bit by bit."""
    named = dict(tensors)
    return named.keys() == expected.keys() and all(
        torch.equal(named[name], tensor) for name, tensor in expected.items()
    )


def open_files() -> list[str]:
    """Return the files that this process has open, without Ray's sockets, pipes and its store."""
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sorted(link for link in links if link.startswith("/") and "plasma" not in link)


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Run the event loop of an actor's process in a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def threads_end() -> None:
    """Wait for the functions that the event loop runs in threads, and for their callbacks."""
    await asyncio.get_running_loop().shutdown_default_executor()
    await asyncio.sleep(0)

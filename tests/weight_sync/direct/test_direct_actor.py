"""Direct updates from the learner's publisher to a rollout actor, in one process without Ray."""

import asyncio
import sys
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from actors import ray_actor
from actors.config import ActorsConfig
from actors.ray_actor import ActorParts, ActorSpec, RolloutActor
from tests.waiting import until
from tests.weight_sync.checksum import checksum
from tests.weight_sync.direct.fakes import FakeEngine, FakeSender
from weight_sync.broadcaster import Broadcaster
from weight_sync.config import WeightSyncConfig
from weight_sync.direct import ray_links
from weight_sync.errors import LoadFailed


class FakeVllm(FakeEngine):
    """An engine that a rollout actor starts and closes."""

    def __init__(self, tensors: dict) -> None:
        super().__init__()
        self._inventory = {name: (None, tuple(tensor.shape)) for name, tensor in tensors.items()}

    def inventory(self) -> dict:
        return self._inventory

    async def start(self) -> None: ...
    async def close(self) -> None: ...


class FakeWorker:
    def __init__(self) -> None:
        self.versions: list[int] = []
        self.left = asyncio.Event()

    async def on_version(self, version: int) -> None:
        self.versions.append(version)

    async def run(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self.left.set()


class FakeRunner:
    async def start(self) -> None: ...
    async def close(self) -> None: ...


class FakeRollout(RolloutActor):
    """A rollout actor whose engine and worker are fakes; the rest is its own."""

    def __init__(self, tensors: dict, **arguments: Any) -> None:
        super().__init__(ActorSpec(index=0, **arguments))
        self.engine, self.worker = FakeVllm(tensors), FakeWorker()

    def _build(self) -> ActorParts:
        receiver = self._receiver(self.engine, self.worker)
        return ActorParts(self.engine, FakeRunner(), self.worker, receiver)


class FakeVllmSender(FakeSender):
    """Is connected as a `VllmSender`."""

    def __init__(self, backend, workers, weights, transfer, address, device) -> None:
        assert (backend, workers, device) == ("nccl", [1], "cuda")
        super().__init__(transfer)


class Handle:
    """Calls an actor in the loop of another thread, as a handle of Ray's would."""

    def __init__(self, actor: FakeRollout, loop: asyncio.AbstractEventLoop) -> None:
        self.actor, self._loop = actor, loop
        self.update = SimpleNamespace(remote=lambda *call: self.ask(actor.update(*call)))

    def ask(self, answer: Any) -> Future:
        return asyncio.run_coroutine_threadsafe(answer, self._loop)


async def test_a_rollout_actor_is_served_ends_with_its_engine_and_is_seeded_when_made_again(
    loop, weights, monkeypatch
) -> None:
    config, broadcaster = WeightSyncConfig(transport="nccl", timeout_seconds=30), Broadcaster(1, 1)
    handles: list[Handle] = []
    monkeypatch.setitem(
        sys.modules, "weight_sync.direct.vllm_sender", SimpleNamespace(VllmSender=FakeVllmSender)
    )
    monkeypatch.setattr("ray.get", lambda future, timeout: future.result(timeout))
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    context = lambda: SimpleNamespace(current_actor=handles[-1])  # noqa: E731
    monkeypatch.setattr(ray_actor, "ray", SimpleNamespace(get_runtime_context=context))

    def begin() -> tuple[Handle, Future]:
        async def make() -> FakeRollout:
            return FakeRollout(
                weights(0), config=ActorsConfig(engine="scripted", reward=["reasoning_gym"]),
                weight_sync=config, model_path="", seed=0, group_size=1, heartbeat_seconds=60.0,
                broker=None, broadcaster=broadcaster,
            )  # fmt: skip

        actor = asyncio.run_coroutine_threadsafe(make(), loop).result(30)
        handles.append(Handle(actor, loop))
        handles[-1].ask(actor.start()).result(30)
        return handles[-1], handles[-1].ask(actor.run())

    first, runs = begin()
    with ray_links.make_direct_publisher(config, broadcaster, seed_seconds=0.01) as publisher:
        digest = publisher.publish(0, weights(0).items())
        until(lambda: first.actor.worker.versions == [0])
        assert checksum(first.actor.engine.weights.items()) == digest.result(30)
        first.actor.engine.fails = 1
        digest = publisher.publish(1, weights(1).items())
        with pytest.raises(LoadFailed, match="injected"):
            runs.result(30)
        assert first.actor.engine.events[-1] == "update_weights", "it is not resumed"
        first.ask(broadcaster.release("engine-0")).result(30)
        second, runs = begin()
        until(lambda: second.actor.worker.versions == [1])
        assert checksum(second.actor.engine.weights.items()) == digest.result(30)
        second.ask(second.actor.stop(5.0)).result(30)
        runs.result(30)
    reports = await broadcaster.reports(0)
    assert [(r.version, r.seeding, r.error) for r in reports] == [
        (0, True, None),
        (1, False, "LoadFailed: injected"),
        (1, True, None),
    ]

"""Unstaged updates on a cluster: engines are found where they joined, and called one by one."""

import asyncio
import time
from typing import Any

import pytest

from weight_sync.announcements import WeightUpdateReport
from weight_sync.checksum import checksum
from weight_sync.direct.publisher import DirectPublisher

pytestmark = pytest.mark.ray


class FakeActor:
    """A rollout actor that records the calls to its receiver."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.checksum = ""

    async def pause(self, version: int, token: str) -> None:
        self.calls.append(("pause", version))

    async def transfer(self, token: str, method: str, payload: dict[str, Any]) -> None:
        if method == "explode":
            raise ConnectionResetError("a cable")
        self.checksum = checksum(payload["weights"])
        self.calls.append(("transfer", method))

    async def resume(self, token: str) -> None:
        self.calls.append(("resume",))

    async def received(self) -> tuple[list[tuple], str]:
        return self.calls, self.checksum


class FakeSender:
    def send(self, weights, transfer) -> None:
        transfer("update_weights", [{"weights": weights}])

    def close(self) -> None:
        pass


def await_death(actor: Any) -> None:
    """Wait until Ray has ended an actor that was killed; calls may still reach it before."""
    import ray
    from ray.exceptions import RayActorError

    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            ray.get(actor.received.remote(), timeout=30)
        except RayActorError:
            return
        time.sleep(0.02)
    pytest.fail("the actor is still there")


def test_engines_join_get_every_version_and_leave_with_their_actor(ray_cluster, weights) -> None:
    import ray

    from weight_sync.direct.ray_links import JoinedEngines
    from weight_sync.errors import LoadFailed
    from weight_sync.ray_broadcaster import create_broadcaster

    broadcaster = create_broadcaster(1.0, 1)
    actor = ray.remote(FakeActor).options(num_cpus=0).remote()
    joined = JoinedEngines(broadcaster)
    assert joined() == []
    asyncio.run(broadcaster.join("e0", actor, 2))
    (link,) = joined()
    assert (link.engine_id, link.workers) == ("e0", 2)
    assert joined()[0] is link

    def report(report: WeightUpdateReport) -> None:
        asyncio.run(broadcaster.report(report))

    with DirectPublisher(joined, lambda *_: FakeSender(), report, timeout=30) as publisher:
        digest = publisher.publish(5, weights(5).items())
        publisher.flush(60)
    calls, received = ray.get(actor.received.remote(), timeout=30)
    assert calls == [("pause", 5), ("transfer", "update_weights"), ("resume",)]
    assert received == digest
    (taken,) = asyncio.run(broadcaster.reports(0))
    assert (taken.engine_id, taken.version, taken.error) == ("e0", 5, None)

    with pytest.raises(ConnectionResetError, match="a cable"):
        link.transfer("a token", "explode", None)
    ray.kill(actor)
    await_death(actor)
    with pytest.raises(LoadFailed, match="e0, asked to pause, is gone"):
        link.pause(6, "a token")
    again = ray.remote(FakeActor).options(num_cpus=0).remote()
    asyncio.run(broadcaster.join("e0", again, 2))
    assert joined()[0] is not link
    asyncio.run(broadcaster.release("e0"))
    assert joined() == []
    ray.kill(again)
    ray.kill(broadcaster.handle)

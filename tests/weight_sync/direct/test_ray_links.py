"""Unstaged updates on a cluster: engines are found where they joined, and called one by one."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.waiting import until
from tests.weight_sync.checksum import checksum
from tests.weight_sync.direct.fakes import TRANSFER, FakeSender
from weight_sync.announcements import WeightUpdateReport
from weight_sync.direct.publisher import DirectPublisher

pytestmark = pytest.mark.ray


class FakeActor:
    """A rollout actor that records the calls to its receiver."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.checksum = ""

    async def update(self, step: Callable, *arguments: Any) -> None:
        if step.__name__ == "transfer":
            _, method, payload = arguments
            if method == "explode":
                raise ConnectionResetError("a cable")
            if method == "update_weights":
                self.checksum = checksum(payload["update_info"]["tensors"])
            self.calls.append(("transfer", method))
        else:
            numbers = [number for number in arguments if isinstance(number, int)]
            self.calls.append((step.__name__, *numbers))

    async def received(self) -> tuple[list[tuple], str]:
        return self.calls, self.checksum


def is_dead(actor: Any) -> bool:
    """Return True once Ray has ended an actor that was killed; calls may still reach it before."""
    import ray
    from ray.exceptions import RayActorError

    try:
        ray.get(actor.received.remote(), timeout=30)
    except RayActorError:
        return True
    return False


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

    connect = lambda links, weights, transfer: FakeSender(transfer)  # noqa: E731
    with DirectPublisher(joined, connect, report, timeout=30) as publisher:
        digest = publisher.publish(5, weights(5).items())
        publisher.flush(60)
    calls, received = ray.get(actor.received.remote(), timeout=30)
    methods = ["init_weight_transfer_engine", *TRANSFER]
    assert calls == [("pause", 5), *(("transfer", method) for method in methods), ("resume",)]
    assert received == digest.result(30)
    (taken,) = asyncio.run(broadcaster.reports(0))
    assert (taken.engine_id, taken.version, taken.error) == ("e0", 5, None)

    with pytest.raises(ConnectionResetError, match="a cable"):
        link.transfer("a token", "explode", None)
    ray.kill(actor)
    until(lambda: is_dead(actor))
    with pytest.raises(LoadFailed, match="e0, asked to pause, is gone"):
        link.pause(6, "a token")
    again = ray.remote(FakeActor).options(num_cpus=0).remote()
    asyncio.run(broadcaster.join("e0", again, 2))
    assert joined()[0] is not link
    asyncio.run(broadcaster.release("e0"))
    assert joined() == []
    ray.kill(again)
    ray.kill(broadcaster.handle)

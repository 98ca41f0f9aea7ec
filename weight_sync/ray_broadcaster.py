"""The broadcaster as a Ray actor, and its client."""

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

import ray

from weight_sync.announcements import Announcements, WeightUpdateReport
from weight_sync.broadcaster import Broadcaster
from weight_sync.errors import BroadcasterDied
from weight_sync.manifest import Manifest
from weight_sync.ray_calls import remote_errors

Answer = TypeVar("Answer")

ANSWER_SECONDS = 30.0
"""Deadline of a call, beyond the wait that it asks for."""


def create_broadcaster(
    update_fraction: float, engines: int, *, permit_seconds: float = 60.0, **options: Any
) -> "BroadcasterClient":
    """Start a `Broadcaster` on the cluster; `options` are options of its Ray actor."""
    waiting_calls = 4 * engines + 64
    remote = ray.remote(Broadcaster).options(
        **{"num_cpus": 0, "max_concurrency": waiting_calls, **options}
    )
    return BroadcasterClient(remote.remote(update_fraction, engines, permit_seconds=permit_seconds))


class BroadcasterClient(Announcements):
    """The methods of `Broadcaster` from any process of the cluster; can be sent to others.

    Every method raises BroadcasterDied if the actor is gone or does not answer in time.
    """

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        """The broadcaster's process in Ray."""

    async def announce(self, manifest: Manifest) -> None:
        """Announce a version; may be awaited in any event loop, a publisher's included."""
        await _answer(self.actor.announce.remote(manifest))

    async def newest(self, after: int, timeout: float) -> Manifest | None:
        return await _answer(self.actor.newest.remote(after, timeout), timeout)

    async def acquire_swap(self, engine_id: str, timeout: float) -> bool:
        return await _answer(self.actor.acquire_swap.remote(engine_id, timeout), timeout)

    async def report(self, report: WeightUpdateReport) -> None:
        await _answer(self.actor.report.remote(report))

    async def release(self, engine_id: str) -> None:
        await _answer(self.actor.release.remote(engine_id))

    async def join(self, engine_id: str, engine: Any, workers: int) -> None:
        await _answer(self.actor.join.remote(engine_id, engine, workers))

    async def engines(self) -> dict[str, tuple[Any, int]]:
        return await _answer(self.actor.engines.remote())

    async def reports(self, since: int) -> list[WeightUpdateReport]:
        return await _answer(self.actor.reports.remote(since))


async def _answer(call: Awaitable[Answer], wait: float = 0.0) -> Answer:
    """Await a call that may wait `wait` seconds before it answers."""
    seconds = wait + ANSWER_SECONDS
    with remote_errors("the broadcaster", seconds, gone=BroadcasterDied, late=BroadcasterDied):
        async with asyncio.timeout(seconds):
            return await call

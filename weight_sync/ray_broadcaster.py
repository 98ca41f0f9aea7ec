"""The broadcaster as a Ray actor, and its client.

The actor has no state that others do not have too, so Ray restarts it when it dies, and calls whose
answer was lost are repeated. A supervisor counts the restarts and has the learner announce again.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

import ray

from weight_sync.announcements import Announcements, WeightUpdateReport
from weight_sync.broadcaster import Broadcaster
from weight_sync.errors import BroadcasterDied
from weight_sync.manifest import Manifest
from weight_sync.ray_calls import remote_errors

Answer = TypeVar("Answer")

ANSWER_SECONDS = 30.0
"""Time after which a call is sent again, beyond the wait that it asks for."""
GIVE_UP_SECONDS = 600.0
"""Deadline of a call, beyond that wait; it covers restarts of the broadcaster."""
START_SECONDS = 120.0
"""Deadline of a new process to answer."""
NEVER = sys.maxsize
"""A version, or a number of reports, that is never reached."""
MAX_CONCURRENCY = 10_000
"""Calls that may wait at once, a few for each engine."""


def create_broadcaster(
    update_fraction: float, engines: int, *, permit_seconds: float = 60.0, **options: Any
) -> "BroadcasterClient":
    """Start a `Broadcaster` on the cluster; `options` are options of its Ray actor."""
    remote = ray.remote(Broadcaster).options(
        **{
            "num_cpus": 0,
            "max_concurrency": MAX_CONCURRENCY,
            "max_restarts": -1,
            "max_task_retries": -1,
            **options,
        }
    )
    return BroadcasterClient(remote.remote(update_fraction, engines, permit_seconds=permit_seconds))


class BroadcasterClient(Announcements):
    """The methods of `Broadcaster` from any process of the cluster; can be sent to others.

    Every call waits while the broadcaster is restarted, and raises BroadcasterDied if the actor is
    gone for good or does not answer in time.
    """

    def __init__(self, handle: Any, epoch: int = 0) -> None:
        self.handle = handle
        """The broadcaster's process in Ray."""
        self.epoch = epoch
        """That of the learner which announces by this client."""

    def of_epoch(self, epoch: int) -> "BroadcasterClient":
        """Return the client of a learner that was made again."""
        return BroadcasterClient(self.handle, epoch)

    async def announce(self, manifest: Manifest) -> None:
        """Announce a version; may be awaited in any event loop, a publisher's included."""
        await _answer(lambda: self.handle.announce.remote(manifest, self.epoch))

    async def newest(
        self, after: int, timeout: float, digest: str | None = None
    ) -> Manifest | None:
        return await _answer(lambda: self.handle.newest.remote(after, timeout, digest), timeout)

    async def acquire_swap(self, engine_id: str, timeout: float) -> bool:
        return await _answer(lambda: self.handle.acquire_swap.remote(engine_id, timeout), timeout)

    async def report(self, report: WeightUpdateReport) -> None:
        await _answer(lambda: self.handle.report.remote(report))

    async def release(self, engine_id: str) -> None:
        await _answer(lambda: self.handle.release.remote(engine_id))

    async def resize(self, engines: int) -> None:
        await _answer(lambda: self.handle.resize.remote(engines))

    async def join(self, engine_id: str, engine: Any, workers: int) -> None:
        await _answer(lambda: self.handle.join.remote(engine_id, engine, workers))

    async def engines(self) -> dict[str, tuple[Any, int]]:
        return await _answer(lambda: self.handle.engines.remote())

    async def reports(self, since: int) -> list[WeightUpdateReport]:
        return await _answer(lambda: self.handle.reports.remote(since))

    async def start(self, *, again: bool = False) -> None:
        """Wait until the broadcaster answers, for the first time or `again`.

        Raises TimeoutError after START_SECONDS.
        """
        async with asyncio.timeout(START_SECONDS):
            await self.reports(NEVER)

    async def live(self) -> None:
        """Wait for the death of the process, which Ray restarts; raise RayError then."""
        # This call waits for ever, and is not repeated when the process dies.
        await self.handle.newest.options(max_task_retries=0).remote(NEVER, 1e9)

    async def ping(self) -> None:
        """Wait for an answer."""
        await self.handle.reports.remote(NEVER)

    def stop(self, *, again: bool = False) -> None:
        """End the process for good, or so that Ray starts it `again`."""
        ray.kill(self.handle, no_restart=not again)


async def _answer(send: Callable[[], Awaitable[Answer]], wait: float = 0.0) -> Answer:
    """Send a call, which may wait `wait` seconds before it answers, until it is answered.

    A call that Ray has lost is not answered by a broadcaster that works: it is sent again.
    """
    longest = wait + GIVE_UP_SECONDS
    with remote_errors("the broadcaster", longest, gone=BroadcasterDied, late=BroadcasterDied):
        async with asyncio.timeout(longest):
            while True:
                with suppress(TimeoutError):
                    return await asyncio.wait_for(send(), wait + ANSWER_SECONDS)

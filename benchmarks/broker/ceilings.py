"""Ceilings of the broker's throughput: the same messages without any work, and the same bytes."""

import asyncio
import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.broker.load import BATCH, GROUP_SIZE, WINDOW, make_lease, template
from queues.ray_broker import BrokerActor
from queues.records import Batch, Lease, Prompt, Purpose, PutStatus
from queues.schema import to_arrays


class CountedBroker(BrokerActor):
    """The broker, with a count of the syncs of its journal."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.syncs, fdatasync = 0, os.fdatasync

        def counted(file: Any) -> None:
            self.syncs += 1
            fdatasync(file)

        vars(os)["fdatasync"] = counted

    async def synced(self) -> int:
        """Return the number of syncs so far."""
        return self.syncs


class EmptyBroker:
    """Answers what the broker would, without keeping, checking or deciding anything."""

    def __init__(self, tokens: int) -> None:
        self._payload = template(tokens)
        self._issued = self._leased = self._put = self._wanted = 0
        self._queue_is_short, self._batch_is_ready = asyncio.Event(), asyncio.Event()
        self._queue_is_short.set()

    async def prompts_wanted(self, timeout: float) -> int:
        """Ask for a window of prompts whenever the queue is short."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._queue_is_short.wait(), timeout)
            self._queue_is_short.clear()
            return WINDOW
        return 0

    async def issue(
        self,
        prompts: Sequence[Prompt],
        *,
        cursor: str,
        last: bool = False,
        token: str | None = None,
    ) -> None:
        """See `Broker.issue`."""
        self._issued += len(prompts)

    async def serving(self, engine_id: str, version: int) -> None:
        """See `Broker.serving`."""

    async def lease(
        self, engine_id: str, capacity: int, timeout: float, purpose: Purpose | None = None
    ) -> list[Lease]:
        """See `Broker.lease`; never empty."""
        first = self._leased + 1
        self._leased += capacity // GROUP_SIZE
        if self._issued - self._leased < WINDOW:
            self._queue_is_short.set()
        return [make_lease(number) for number in range(first, self._leased + 1)]

    async def put_many(self, puts: Sequence[tuple[str, bytes]]) -> list[PutStatus]:
        """See `Broker.put_many`."""
        self._put += len(puts)
        if self._put >= self._wanted:
            self._batch_is_ready.set()
        return [PutStatus.ACCEPTED] * len(puts)

    async def take(self, version: int, timeout: float, *, epoch: int = 0) -> Batch | None:
        """See `Broker.take`; equal payloads, each of which travels."""
        self._wanted = (version + 1) * BATCH
        self._batch_is_ready.clear()
        if self._put < self._wanted:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._batch_is_ready.wait(), timeout)
        if self._put < self._wanted:
            return None
        return Batch(version=version, payloads=to_arrays([self._payload] * BATCH))

    async def ack(self, version: int, statistics: Any, *, epoch: int = 0) -> bool:
        """See `Broker.ack`."""
        return True


def write_and_sync(
    directory: Path, payload: bytes, groups_per_sync: float, seconds: float
) -> float:
    """Return the ceiling of the disk: groups/s of these bytes, synced after so many groups."""
    path, groups, due = directory / "ceiling", 0, groups_per_sync
    with path.open("wb", buffering=0) as file:
        began = time.perf_counter()
        while (elapsed := time.perf_counter() - began) < seconds:
            file.write(payload)
            groups += 1
            if groups >= due:
                os.fdatasync(file.fileno())
                due += groups_per_sync
    path.unlink()
    return groups / elapsed

"""The broker's side of `WorkQueue`: leases go out, results and failures come in."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from queues.broker.commit_pipeline import CommitPipeline
from queues.broker.lease_expiry import LeaseExpiry
from queues.broker.result_intake import PayloadBatching, ResultIntake
from queues.broker.retention import Retention
from queues.errors import ProtocolError, QueueClosed, QueuesError, SchemaError
from queues.protocols import WorkQueue
from queues.records import Lease, Purpose, PutStatus
from queues.state.groups import ENGINE_LOST


class BrokerWorkQueue(WorkQueue):
    """Grants and renews leases, and accepts what was leased."""

    def __init__(self, commits: CommitPipeline, retention: Retention) -> None:
        self.commits = commits
        self.leases = LeaseExpiry(commits)
        self._payloads = PayloadBatching()
        self.intake = ResultIntake(commits, self._payloads, retention)
        self._released: Counter[str] = Counter()
        """Number of `release` calls for each engine."""

    async def serving(self, engine_id: str, version: int) -> None:
        self.commits.check_open()
        self.commits.state.serving(engine_id, version)
        self.commits.lease_polls.wake(engine_id)

    async def lease(
        self, engine_id: str, capacity: int, timeout: float, purpose: Purpose | None = None
    ) -> list[Lease]:
        if capacity < 1:
            raise ProtocolError(f"lease: capacity = {capacity} must be at least 1")
        commits, state = self.commits, self.commits.state
        released = self._released[engine_id]

        def decide() -> tuple[list[Lease], asyncio.Future[dict[str, bytes]]] | None:
            if self._released[engine_id] != released:
                return None  # the caller is gone; its successor calls by itself
            now, expires = time.monotonic(), self.leases.expiry()
            leases = state.lease(engine_id, capacity, now=now, expires=expires, purpose=purpose)
            if not leases:
                return None
            in_flight = state.groups.in_flight
            continued = [x.group_id for x in leases if in_flight[x.group_id].saved is not None]

            def record() -> dict[str, bytes]:
                commits.ledger.lease(engine_id, leases)
                return commits.ledger.partials.read(continued)

            return leases, commits.submit(record)

        decided = await commits.lease_polls.until(decide, timeout, name=engine_id)
        if decided is None:
            return []
        leases, durable = decided
        self.leases.watch()
        commits.prompt_polls.wake()
        saved = await durable
        return [replace(lease, saved=saved.get(lease.group_id)) for lease in leases]

    async def heartbeat(
        self, engine_id: str, held: Sequence[tuple[str, int]]
    ) -> list[tuple[str, int]]:
        self.commits.check_open()
        lost = []
        for group_id, attempt in held:
            group = self.commits.state.groups.in_flight.get(group_id)
            if group is None or not group.is_from(engine_id, attempt):
                lost.append((group_id, attempt))
            else:
                group.expires = self.leases.expiry()
        return lost

    async def put(self, engine_id: str, payload: bytes) -> PutStatus:
        (answer,) = await self.intake.put_many([(engine_id, payload)])
        if isinstance(answer, QueuesError):
            raise answer
        return answer

    async def save(self, engine_id: str, payload: bytes) -> None:
        (summary,) = await self._payloads.summarize([payload])
        if isinstance(summary, SchemaError):
            raise summary
        self.commits.check_open()
        group = self.commits.state.groups.leased_to(engine_id, summary.group_id, summary.attempt)
        if group is None or group.evaluation:
            return
        if summary.oldest_version is None:
            raise SchemaError(f"loss_mask: nothing of group {summary.group_id} is sampled")
        group.saved = summary.oldest_version
        save = self.commits.ledger.partials.save
        await self.commits.durable(partial(save, group.group_id, summary.oldest_version, payload))

    async def fail(
        self, engine_id: str, group_id: str, attempt: int, *, reason: str, error: str
    ) -> None:
        self.commits.check_open()
        error = error.encode(errors="replace").decode()  # SQLite takes only valid UTF-8
        group = self.commits.state.groups.leased_to(engine_id, group_id, attempt)
        if group is not None:
            await self.leases.give_back([group], reason, error)

    async def release(self, engine_id: str) -> int:
        self.commits.check_open()
        state = self.commits.state
        state.engines.pop(engine_id, None)
        self._released[engine_id] += 1
        held = [group for group in state.groups.leased() if group.engine_id == engine_id]
        await self.leases.give_back(held, ENGINE_LOST, f"{engine_id} is gone")
        if state.over:
            raise QueueClosed("release: the run is over")
        return len(held)

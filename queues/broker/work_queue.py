"""The broker's side of `WorkQueue`: leases go out, results and failures come in.

A lease ends without a result when its worker returns it, is released, or misses heartbeats.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial

from headway.errors import HeadwayError
from queues.broker.commit_pipeline import CommitPipeline
from queues.broker.result_intake import PayloadBatching, ResultIntake
from queues.broker.retention import Retention
from queues.errors import LedgerError, ProtocolError, QueueClosed, SchemaError
from queues.protocols import WorkQueue
from queues.records import Lease, Purpose, PutStatus
from queues.state.groups import ENGINE_LOST, UNCLAIMED, Group, State, oldest_of
from queues.storage.ledger_schema import SERVES

log = logging.getLogger(__name__)
LONGEST_ERROR = 16_000
"""Most characters of an error that are kept."""


class BrokerWorkQueue(WorkQueue):
    """Grants and renews leases, and accepts what was leased; one task lets leases expire."""

    def __init__(self, commits: CommitPipeline, retention: Retention) -> None:
        self.commits = commits
        self._lease_seconds = commits.state.config.lease_seconds
        self._payloads = PayloadBatching()
        self.intake = ResultIntake(commits, self._payloads, retention)
        self._released: Counter[str] = Counter()
        """Number of `release` calls for each engine."""
        self._watching: asyncio.Task[None] | None = None

    async def serving(self, engine_id: str, version: int) -> None:
        commits = self.commits
        commits.check_open()
        commits.state.serving(engine_id, version)
        key = f"{SERVES}{engine_id}"
        durable = commits.submit(lambda: commits.ledger.note(key, f"{version}"))
        commits.lease_polls.wake(engine_id)
        await durable

    async def lease(
        self, engine_id: str, capacity: int, timeout: float, purpose: Purpose | None = None
    ) -> list[Lease]:
        if capacity < 1:
            raise ProtocolError(f"lease: capacity = {capacity} must be at least 1")
        commits, state = self.commits, self.commits.state
        released = self._released[engine_id]
        commits.check_open()
        self._watch_leases()

        def decide() -> asyncio.Future[list[Lease]] | None:
            if self._released[engine_id] != released:
                return None  # the caller is gone; its successor calls by itself
            now = time.monotonic()
            expires = now + self._lease_seconds
            leases = state.lease(engine_id, capacity, now=now, expires=expires, purpose=purpose)
            if not leases:
                return None
            in_flight = state.groups.in_flight
            begun = {
                group.group_id: {"saved": group.saved is not None, "noted": group.noted is not None}
                for group in (in_flight[lease.group_id] for lease in leases)
                if group.attempt > 1
            }

            def record() -> list[Lease]:
                commits.ledger.lease(engine_id, leases)
                with_begun = commits.ledger.with_begun
                return [
                    with_begun(x, **begun[x.group_id]) if x.group_id in begun else x for x in leases
                ]

            return commits.submit(record)

        durable = await commits.lease_polls.until(decide, timeout, name=engine_id)
        if durable is None:
            return []
        self._watch_leases()
        commits.prompt_polls.wake()
        return await durable

    async def heartbeat(
        self, engine_id: str, held: Collection[tuple[str, int]]
    ) -> list[tuple[str, int]]:
        held = [*held]
        self.commits.check_open()
        self._watch_leases()
        if unclaimed := self.commits.state.groups.claim(engine_id, held):
            await self._give_back(unclaimed, UNCLAIMED, f"{engine_id} had no answer to its lease")
        lost = []
        for group_id, attempt in held:
            group = self.commits.state.groups.in_flight.get(group_id)
            if group is None or not group.is_from(engine_id, attempt):
                lost.append((group_id, attempt))
            else:
                group.expires = time.monotonic() + self._lease_seconds
        return lost

    async def put(self, engine_id: str, payload: bytes) -> PutStatus:
        (answer,) = await self.intake.put_many([(engine_id, payload)])
        if isinstance(answer, HeadwayError):
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
        save = self.commits.ledger.save_partial
        await self.commits.durable(partial(save, group.group_id, summary.oldest_version, payload))

    async def note(
        self,
        engine_id: str,
        group_id: str,
        attempt: int,
        sample_index: int,
        name: str,
        payload: bytes,
        oldest_version: int | None,
    ) -> bytes:
        self.commits.check_open()
        group = self.commits.state.groups.leased_to(engine_id, group_id, attempt)
        if group is None or group.evaluation:
            return payload
        group.noted = oldest_of(group.noted, oldest_version)
        row = (group_id, sample_index, name, oldest_version, payload)
        return await self.commits.durable(partial(self.commits.ledger.keep_note, row))

    async def fail(
        self, engine_id: str, group_id: str, attempt: int, *, reason: str, error: str
    ) -> None:
        self.commits.check_open()
        # SQLite takes only valid UTF-8, and every attempt of every group writes one.
        error = error[:LONGEST_ERROR].encode(errors="replace").decode()
        group = self.commits.state.groups.leased_to(engine_id, group_id, attempt)
        if group is not None:
            await self._give_back([group], reason, error)

    async def release(self, engine_id: str) -> int:
        self.commits.check_open()
        state = self.commits.state
        state.engines.pop(engine_id, None)
        self._released[engine_id] += 1
        held = [group for group in state.groups.leased() if group.engine_id == engine_id]
        forget = partial(self.commits.ledger.forget, f"{SERVES}{engine_id}")
        await self._give_back(held, ENGINE_LOST, f"{engine_id} is gone", forget)
        if state.over:
            raise QueueClosed("release: the run is over")
        return len(held)

    async def _give_back(
        self, groups: Sequence[Group], reason: str, error: str, *also: Callable[[], None]
    ) -> None:
        """End the leases of groups without a result, in one transaction, with other changes."""
        commits, state = self.commits, self.commits.state
        changes = [*also]
        now = time.monotonic()
        for group in groups:
            new_state = state.give_back(group, reason, now=now)
            state.last_error = (
                f"group {group.group_id} (prompt {group.prompt.prompt_id}), attempt"
                f" {group.attempt} by {group.engine_id}: {reason}: {error}"
            )
            wait = group.not_before - now
            waits = new_state is State.QUEUED and wait > 0
            delay = f" for {wait:g} s at least" if waits else ""
            log.warning("now %s%s: %s", new_state, delay, state.last_error)
            if waits:
                commits.lease_polls.wake_at(group.not_before)
            if new_state is State.FAILED:
                changes.append(partial(commits.ledger.fail, group.group_id, reason, error))
            else:
                changes.append(partial(commits.ledger.redeliver, group.group_id, error))
        await commits.durable(lambda: [change() for change in changes], *commits.all_polls)

    def _watch_leases(self) -> None:
        """Let leases expire from now on, if there are any."""
        watched = self._watching is not None and not self._watching.done()
        if self.commits.state.groups.any_leased and not watched:
            self._watching = asyncio.create_task(self._expire())

    async def _expire(self) -> None:
        """Return leases without a heartbeat to the queue until nothing is leased.

        Time with a full disk does not count. If this fails, the broker serves nothing more, so that
        nobody waits for lost groups.
        """
        try:
            while leased := self.commits.state.groups.leased():
                now = time.monotonic()
                excused = self.commits.paused_until + self._lease_seconds
                for group in leased:
                    group.expires = max(group.expires, excused)
                expired = [group for group in leased if group.expires <= now]
                if expired:
                    reason = f"no heartbeat for {self._lease_seconds:g} s"
                    await self._give_back(expired, "lease_expired", reason)
                else:
                    await asyncio.sleep(min(group.expires for group in leased) - now)
        except Exception as error:
            log.exception("leases cannot expire any more")
            failure = LedgerError(f"leases cannot expire, nothing more is served: {error!r}")
            failure.__cause__ = error
            self.commits.fail(failure)

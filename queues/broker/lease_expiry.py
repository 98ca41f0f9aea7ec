"""Lease expiry. A lease ends without a result when its worker returns it or misses heartbeats."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from queues.broker.commit_pipeline import CommitPipeline
from queues.errors import LedgerError
from queues.state.groups import Group, State

log = logging.getLogger(__name__)


class LeaseExpiry:
    """Ends leases without a result; one task watches while anything is leased."""

    def __init__(self, commits: CommitPipeline) -> None:
        self._commits = commits
        self._lease_seconds = commits.state.config.lease_seconds
        self._watching: asyncio.Task[None] | None = None

    def expiry(self) -> float:
        """Return when a lease that is granted or renewed now expires, in monotonic seconds."""
        return time.monotonic() + self._lease_seconds

    def watch(self) -> None:
        """Start to watch the leases, unless they are watched already."""
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())

    def stop(self) -> None:
        """Stop watching: no lease expires any more."""
        if self._watching is not None:
            self._watching.cancel()

    async def give_back(self, groups: Sequence[Group], reason: str, error: str) -> None:
        """End the leases of groups without a result, in one transaction."""
        commits, state = self._commits, self._commits.state
        changes: list[Callable[[], None]] = []
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
            log.warning("%s; now %s%s", state.last_error, new_state, delay)
            if waits:
                commits.lease_polls.wake_at(group.not_before)
            if new_state is State.FAILED:
                changes.append(partial(commits.ledger.fail, group.group_id, reason, error))
            else:
                changes.append(partial(commits.ledger.redeliver, group.group_id, error))
        await commits.durable(lambda: [change() for change in changes], *commits.all_polls)

    async def _watch(self) -> None:
        """Expire leases; if that fails, close the broker, so that nobody waits for lost groups."""
        try:
            await self._expire()
        except Exception as error:
            log.exception("leases cannot expire any more")
            failure = LedgerError(f"leases cannot expire, nothing more is served: {error!r}")
            failure.__cause__ = error
            self._commits.fail(failure)

    async def _expire(self) -> None:
        """Give back leases without a heartbeat, until nothing is leased; none with a full disk."""
        while leased := self._commits.state.groups.leased():
            now = time.monotonic()
            excused = self._commits.paused_until + self._lease_seconds
            for group in leased:
                group.expires = max(group.expires, excused)
            expired = [group for group in leased if group.expires <= now]
            if expired:
                error = f"no heartbeat for {self._lease_seconds:g} s"
                await self.give_back(expired, "lease_expired", error)
            else:
                await asyncio.sleep(min(group.expires for group in leased) - now)

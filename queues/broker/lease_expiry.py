"""How leases end without a result: given back, or void because their holder is not heard of.

One task watches while anything is leased. What becomes of the groups is decided by
`queues.state.broker_state`: they are redelivered, or fail for good.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from queues.broker.commit_pipeline import Commits
from queues.errors import LedgerError
from queues.state.broker_state import BrokerState
from queues.state.groups import Group, State
from queues.storage.ledger import Ledger

log = logging.getLogger(__name__)


class Leases:
    """Ends leases.

    Args:
        book: Whose groups.
        ledger: Records what becomes of them.
        commits: Makes it durable.
        lease_seconds: How long a lease lasts without a heartbeat.
    """

    def __init__(
        self, book: BrokerState, ledger: Ledger, commits: Commits, *, lease_seconds: float
    ) -> None:
        self._book = book
        self._ledger = ledger
        self._commits = commits
        self._lease_seconds = lease_seconds
        self._watching: asyncio.Task[None] | None = None

    def renewed(self) -> float:
        """When a lease that is granted or renewed now expires, in monotonic seconds."""
        return time.monotonic() + self._lease_seconds

    def watch(self) -> None:
        """Leases were granted."""
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())

    def stop(self) -> None:
        """No lease expires any more."""
        if self._watching is not None:
            self._watching.cancel()

    async def give_back(self, groups: Sequence[Group], reason: str, error: str) -> None:
        """End the leases of groups without a result, in one transaction."""
        records: list[Callable[[], None]] = []
        now = time.monotonic()
        for group in groups:
            state = self._book.give_back(group, reason, now=now)
            self._book.last_error = (
                f"group {group.group_id} (prompt {group.prompt.prompt_id}), attempt"
                f" {group.attempt} by {group.engine_id}: {reason}: {error}"
            )
            wait = group.not_before - now
            later = f" for {wait:g} s at least" if state is State.QUEUED and wait > 0 else ""
            log.warning("%s; now %s%s", self._book.last_error, state, later)
            if later:
                self._commits.work.wake_after(wait)
            if state is State.FAILED:
                records.append(partial(self._ledger.fail, group.group_id, reason, error))
            else:
                records.append(partial(self._ledger.redeliver, group.group_id, error))

        def record() -> None:
            for change in records:
                change()

        commits = self._commits
        await commits.durable(record, commits.work, commits.progress, commits.line)

    async def _watch(self) -> None:
        """Expire leases; if that fails, nobody may go on waiting for groups that are lost."""
        try:
            await self._expire()
        except Exception as error:
            log.exception("leases cannot expire any more")
            failure = LedgerError(f"leases cannot expire, nothing more is served: {error!r}")
            failure.__cause__ = error
            await self._commits.fail(failure)

    async def _expire(self) -> None:
        """Give back what is leased by workers that are not heard of; ends with the last lease.

        While the disk is full nobody can deliver, and workers may wait for it where they would
        renew.
        """
        while leased := self._book.groups.leased():
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

"""The broker: both queues of a run behind one object, in one event loop.

    feeder   prompts_wanted ─▶ issue ─▶ │ queued │ ─▶ lease        worker (also serving, heartbeat)
    feeder               evaluate ────▶ │ leased │ ◀─ put, fail    worker
    supervisor            release ────▶ │        │
    learner                    take ◀── │ ready  │
    learner                     ack ──▶ │ taken  │ ─▶ trained

    who waits          for                               is woken by
    lease              prompts that admission allows     issue, evaluate, serving, ack, fail, and
                                                         the end of patience with engines that lag,
                                                         or of a failed group's wait
    take, evaluation   ready groups, the last result     put, fail, ack
    prompts_wanted     a line that is too short          lease, ack, fail
    (a put whose result is filtered wakes as fail does, and so does a take that leaves stragglers)
    (a lost or released lease wakes as fail does, close wakes all)

The feeder's calls are `feed`, the learner's `batches`, those of workers and their supervisor are
here. The `book` decides, at once and without awaiting; `commits` make it durable; only then is the
caller answered. So a broker that is killed at any moment goes on from its ledger (`recovery`).
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from queues.broker.batch_queue import Batches
from queues.broker.commit_pipeline import Commits
from queues.broker.lease_expiry import Leases
from queues.broker.payload_batching import Arrivals
from queues.broker.prompt_feed import Feed
from queues.broker.recovery import recover
from queues.broker.result_intake import Puts
from queues.broker.retention import Retention
from queues.broker.status import BrokerStatus, status_of
from queues.config import QueuesConfig
from queues.errors import InputError, ProtocolError, QueueClosed, QueuesError, SchemaError
from queues.policy.admission import Bounds
from queues.policy.dynamic_sampling import TieFilter
from queues.policy.prompt_retirement import Retirement
from queues.policy.staleness_controller import StalenessController, WindowController
from queues.readers.accounting import Accounting, account
from queues.records import Batch, Evaluation, Lease, Payload, Prompt, Purpose, PutStatus
from queues.state.broker_state import ENGINE_LOST, BrokerState
from queues.storage.journal import Journal
from queues.storage.ledger import Ledger
from queues.storage.ledger_schema import JOURNAL_NAME

log = logging.getLogger(__name__)


class Broker:
    """Hosts the prompt queue and the results queue of one run; see `queues.protocols`.

    All calls belong to one event loop. After `close` they raise QueueClosed, and after a failed
    commit, or when leases cannot expire any more, LedgerError. Only `status` and `cursor`, which
    read the memory, go on answering.

    Args:
        directory: The run's folder, on a local disk; holds `ledger.sqlite` and `journal/`. A run
            that is there already is gone on with.
        config: Section `[queues]`.
        groups_per_batch: B.
        group_size: G, rollouts per group.
        steps: Batches to train.
        greedy_baseline: Whether train groups are generated with a greedy rollout beside them.
        pass_rate_cap: Pass rate from which a prompt is not issued again
        (`queues.policy.prompt_retirement`);
            None is no cap.
        pass_threshold: Task reward from which a rollout passes.
    """

    def __init__(
        self,
        directory: Path,
        *,
        config: QueuesConfig,
        groups_per_batch: int,
        group_size: int,
        steps: int,
        greedy_baseline: bool = False,
        pass_rate_cap: float | None = None,
        pass_threshold: float = 1.0,
    ) -> None:
        if group_size < 1:
            raise InputError(f"group_size = {group_size} must be at least 1")
        limit = config.max_filtered_batches * groups_per_batch
        self._book = BrokerState(
            bounds=Bounds(
                max_staleness=config.max_staleness,
                groups_per_batch=groups_per_batch,
                steps=steps,
                most_live=config.window,
                on_overdue=config.on_overdue,
            ),
            group_size=group_size,
            queued_batches=config.queued_batches,
            max_attempts=config.max_attempts,
            retry_seconds=config.retry_seconds,
            greedy_baseline=greedy_baseline,
            steering=None
            if config.ess_target is None
            else StalenessController(
                WindowController(
                    target=config.ess_target, most=config.max_staleness, batches=config.ess_batches
                )
            ),
            tie_filter=TieFilter(limit=limit) if config.filter_tied else None,
            retirement=Retirement(cap=pass_rate_cap, threshold=pass_threshold),
        )
        self._ledger = Ledger(directory, synchronous=config.synchronous)
        try:
            recover(self._ledger, self._book)
            self._journal = Journal(directory / JOURNAL_NAME, segment_bytes=config.segment_bytes)
        except BaseException:
            self._ledger.close()
            raise
        self._commits = Commits(
            self._book, self._ledger, self._journal, interval=config.commit_interval_seconds
        )
        self._work = self._commits.work
        self._progress = self._commits.progress
        self._line = self._commits.line
        self._leases = Leases(
            self._book, self._ledger, self._commits, lease_seconds=config.lease_seconds
        )
        self._retention = Retention(directory, self._ledger, self._commits, self._journal)
        self._keeps_all = config.keep_rollouts == "all"
        self._arrivals = Arrivals()
        self._puts = Puts(self._book, self._ledger, self._commits, self._arrivals)
        self._feed = Feed(self._book, self._ledger, self._commits)
        self._batches = Batches(
            self._book,
            self._ledger,
            self._commits,
            self._journal,
            patience_seconds=config.patience_seconds,
        )
        self._released: Counter[str] = Counter()
        """How often the leases of each engine were taken back."""

    # --- the feeder

    async def prompts_wanted(self, timeout: float) -> int:
        """See `Feed.prompts_wanted`."""
        return await self._feed.prompts_wanted(timeout)

    async def issue(self, prompts: Sequence[Prompt], *, cursor: str, last: bool = False) -> None:
        """See `Feed.issue`."""
        await self._feed.issue(prompts, cursor=cursor, last=last)

    async def cursor(self) -> str | None:
        """See `Feed.cursor`."""
        return await self._feed.cursor()

    async def evaluate(
        self, name: str, prompts: Sequence[Prompt], *, temperature: float, min_version: int
    ) -> None:
        """See `Feed.evaluate`."""
        await self._feed.evaluate(name, prompts, temperature=temperature, min_version=min_version)

    async def evaluation(self, name: str, timeout: float) -> Evaluation | None:
        """See `Feed.evaluation`."""
        return await self._feed.evaluation(name, timeout)

    # --- the rollout worker

    async def serving(self, engine_id: str, version: int) -> None:
        """The engine samples from this policy version from now on, never again from an older."""
        self._commits.check_open()
        self._book.serving(engine_id, version)
        await self._work.wake(engine_id)

    async def lease(
        self, engine_id: str, room: int, timeout: float, purpose: Purpose | None = None
    ) -> list[Lease]:
        """Groups to generate; long-polls, empty at the timeout.

        Evaluations come first, then what admission allows at the version that the engine last
        reported. An engine that has reported none gets nothing.

        Args:
            engine_id: Who generates them.
            room: Rollouts that the engine has room for: an evaluation takes 1, a train group
                `group_size`.
            timeout: Seconds.
            purpose: Of all that is leased; None leases for either.

        Raises:
            QueueClosed: The run is over.
        """
        if room < 1:
            raise ProtocolError(f"lease: room = {room} must be at least 1")
        released = self._released[engine_id]

        def decide() -> tuple[list[Lease], asyncio.Future[dict[str, bytes]]] | None:
            if self._released[engine_id] != released:
                return None  # who asks is gone; its successor asks by itself
            now, expires = time.monotonic(), self._leases.renewed()
            leases = self._book.lease(engine_id, room, now=now, expires=expires, purpose=purpose)
            if not leases:
                return None
            in_flight = self._book.groups.in_flight
            going_on = [x.group_id for x in leases if in_flight[x.group_id].saved is not None]

            def record() -> dict[str, bytes]:
                self._ledger.lease(engine_id, leases)
                return self._ledger.partials.read(going_on)

            return leases, self._commits.submit(record)

        decided = await self._work.until(decide, timeout, name=engine_id)
        if decided is None:
            return []
        leases, durable = decided
        self._leases.watch()
        await self._line.wake()
        saved = await durable
        return [replace(lease, saved=saved.get(lease.group_id)) for lease in leases]

    async def heartbeat(
        self, engine_id: str, held: Sequence[tuple[str, int]]
    ) -> list[tuple[str, int]]:
        """Renew the leases of (group id, attempt); returns those that are lost: abort them."""
        self._commits.check_open()
        lost = []
        for group_id, attempt in held:
            group = self._book.groups.in_flight.get(group_id)
            if group is None or not group.is_from(engine_id, attempt):
                lost.append((group_id, attempt))
            else:
                group.expires = self._leases.renewed()
        return lost

    async def put(self, engine_id: str, payload: bytes) -> PutStatus:
        """Deliver a finished group, made by `schema.encode`.

        An accepted one is durable before the answer, and no second one of that group is ever
        accepted. Evaluation groups are scored instead of kept, and train groups without a signal
        are kept but, with `filter_tied`, not trained.

        Raises:
            SchemaError: The payload breaks the schema, or is not what was leased; the lease stays.
            ProtocolError: The group was never issued.
        """
        (answer,) = await self.put_many([(engine_id, payload)])
        if isinstance(answer, QueuesError):
            raise answer
        return answer

    async def put_many(self, puts: Sequence[tuple[str, Payload]]) -> list[PutStatus | QueuesError]:
        """See `Puts.put_many`."""
        with self._retention.put():
            return await self._puts.put_many(puts)

    async def save(self, engine_id: str, payload: bytes) -> None:
        """Keep what there is of a group that has no result yet, in the place of what there was.

        Whoever leases it next is given it, where it still fits (`queues.state.partial_groups`).
        Does nothing where the lease is not, or no longer, the caller's, or is of an evaluation.

        Args:
            engine_id: Who holds the lease.
            payload: Made by `schema.encode`, with at least one sampled token; rollouts without an
                end are `aborted`.

        Raises:
            SchemaError: The payload breaks the schema.
        """
        (found,) = await self._arrivals.summarize([payload])
        if isinstance(found, SchemaError):
            raise found
        self._commits.check_open()
        group = self._book.groups.in_flight.get(found.group_id)
        if group is None or not group.is_leased_to(engine_id, found.attempt) or group.evaluation:
            return
        if found.oldest_version is None:
            raise SchemaError(f"loss_mask: nothing of group {found.group_id} is sampled")
        self._book.save(group, found)
        await self._commits.durable(
            partial(self._ledger.partials.save, group.group_id, found.oldest_version, payload)
        )

    async def fail(
        self, engine_id: str, group_id: str, attempt: int, *, reason: str, error: str
    ) -> None:
        """Give a group back: it is redelivered, and after `max_attempts` failed for this reason.

        Before it is leased again it waits, unless the loss of reward models is the reason.

        Does nothing where the lease is not, or no longer, the caller's.
        """
        self._commits.check_open()
        # Any text may come with an error, and SQLite takes only what UTF-8 can hold.
        error = error.encode(errors="replace").decode()
        group = self._book.groups.in_flight.get(group_id)
        if group is not None and group.is_leased_to(engine_id, attempt):
            await self._leases.give_back([group], reason, error)

    # --- the supervisor of rollout workers

    async def release(self, engine_id: str) -> int:
        """Take back every lease of an engine that is gone, and forget the version it served.

        The groups are redelivered first, as after `fail`; results of the old leases are fenced, and
        its open `lease` calls end empty. A successor of the same name begins with `serving`.

        Returns:
            How many leases it held.

        Raises:
            QueueClosed: The run is over, so that no successor is needed.
        """
        self._commits.check_open()
        self._book.engines.pop(engine_id, None)
        self._released[engine_id] += 1
        held = [group for group in self._book.groups.leased() if group.engine_id == engine_id]
        await self._leases.give_back(held, ENGINE_LOST, f"{engine_id} is gone")
        if self._book.over:
            raise QueueClosed("release: the run is over")
        return len(held)

    # --- the learner

    async def take(self, version: int, timeout: float) -> Batch | None:
        """See `Batches.take`."""
        return await self._batches.take(version, timeout)

    async def ack(self, version: int, statistics: Mapping[str, Any]) -> None:
        """See `Batches.ack`."""
        await self._batches.ack(version, statistics)

    async def commit_checkpoint(self, version: int, path: str) -> None:
        """See `Batches.commit_checkpoint`."""
        await self._batches.commit_checkpoint(version, path)
        if not self._keeps_all:
            await self._retention.apply()

    # --- anyone

    async def accounting(self) -> Accounting:
        """The accounts: the ledger's rows, counted, held against the broker's memory."""
        self._commits.check_open()
        memory = dict(self._book.groups.counts)
        return account(await self._commits.submit(self._ledger.counts), memory)

    async def status(self, after: int = -1) -> BrokerStatus:
        """Where the run is, with the newest batches that were trained later than `after`."""
        return status_of(self._book, after, paused=self._commits.paused)

    async def close(self) -> None:
        """End every long poll with QueueClosed, and the writing of the ledger.

        Afterwards `ledger.sqlite` is the whole ledger, without its -wal file.
        """
        self._leases.stop()
        self._work.stop()
        await self._commits.close()

"""The broker: both queues of a run behind one object, in one event loop.

    feeder   prompts_wanted ─▶ issue ─▶ │ queued │ ─▶ lease        worker (also serving, heartbeat)
    feeder               evaluate ────▶ │ leased │ ◀─ put, fail    worker
    supervisor            release ────▶ │        │
    learner                    take ◀── │ ready  │
    learner                     ack ──▶ │ taken  │ ─▶ trained

    who waits          for                               is woken by
    lease              prompts that admission allows     issue, evaluate, serving, ack, fail, and
                                                         the end of patience with engines that lag
    take, evaluation   ready groups, the last result     put, fail, ack
    prompts_wanted     a line that is too short          lease, ack, fail
    (a put whose result is filtered wakes as fail does)
    (a lost or released lease wakes as fail does, close wakes all)

The `book` decides, at once and without awaiting; `commits` make it durable; only then is the caller
answered. So a broker that is killed at any moment goes on from its ledger (`recovery`).
"""

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from queues import schema
from queues.accounts import Accounting, account
from queues.admission import Bounds
from queues.book import ENGINE_LOST, BatchRecord, Book
from queues.commits import Commits
from queues.config import QueuesConfig
from queues.errors import AccountingError, InputError, ProtocolError, QueueClosed
from queues.evaluations import EvaluationRun
from queues.groups import State
from queues.journal import Journal, Location, read_group
from queues.leases import Leases
from queues.ledger import Ledger, dump_prompt
from queues.ledger_tables import JOURNAL_NAME
from queues.records import Batch, Evaluation, Lease, Prompt, PutStatus
from queues.recovery import recover
from queues.retention import Retention
from queues.retirement import Retirement
from queues.status import BrokerStatus, status_of
from queues.tie_filter import TieFilter

T = TypeVar("T")
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
        pass_rate_cap: Pass rate from which a prompt is not issued again (`queues.retirement`);
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
        self._book = Book(
            bounds=Bounds(
                max_staleness=config.max_staleness,
                groups_per_batch=groups_per_batch,
                steps=steps,
                most_live=config.window,
            ),
            group_size=group_size,
            queued_batches=config.queued_batches,
            max_attempts=config.max_attempts,
            greedy_baseline=greedy_baseline,
            tie_filter=TieFilter(limit=limit) if config.filter_tied else None,
            retirement=None
            if pass_rate_cap is None
            else Retirement(cap=pass_rate_cap, threshold=pass_threshold),
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
        self._retention = (
            Retention(directory, self._ledger, self._commits)
            if config.keep_rollouts == "needed"
            else None
        )
        self._patience_seconds = config.patience_seconds
        self._impatience: asyncio.Task[None] | None = None
        self._released: Counter[str] = Counter()
        """How often the leases of each engine were taken back."""

    # --- the feeder

    async def prompts_wanted(self, timeout: float) -> int:
        """How many train prompts to issue now; long-polls, 0 at the timeout.

        Enough to keep the line filled, and never more groups than the remaining steps can train.

        Raises:
            QueueClosed: None will be wanted any more.
        """
        return await self._line.until(self._book.wanted, timeout) or 0

    async def issue(self, prompts: Sequence[Prompt], *, cursor: str, last: bool = False) -> None:
        """Queue prompts for training, in one transaction with the source's cursor.

        Args:
            prompts: A group is made of each, less those that are retired. Once a whole epoch is,
                the source counts as ended.
            cursor: Where the source goes on after them.
            last: The source has ended; only then may the last batch be short. If that ends training
                before its last step, evaluations of versions that were not reached end without a
                score, all their prompts failed.

        Raises:
            InputError: Metadata that is not JSON, or with a pass-rate cap an id without an epoch.
        """
        self._commits.check_open()
        book = self._book
        if book.ended:
            raise ProtocolError("issue: the last prompts were issued before")
        kept, exhausted = book.select(prompts)
        texts = [dump_prompt(prompt) for prompt in kept]
        last = last or exhausted
        book.cursor, book.ended = cursor, last
        if exhausted:
            log.warning("all prompts of an epoch are retired: the source counts as ended")
        if prompts and not kept and not last:
            return  # a cursor that a crash forgets only brings the same retired prompts again
        groups = book.issue(kept)
        await self._commits.durable(
            partial(self._ledger.issue, groups, texts, cursor, last=last),
            self._work, *((self._progress, self._line) if last else ()),
        )  # fmt: skip

    async def cursor(self) -> str | None:
        """The cursor of the last `issue`; None before the first."""
        return self._book.cursor

    async def evaluate(
        self, name: str, prompts: Sequence[Prompt], *, temperature: float, min_version: int
    ) -> None:
        """Queue an evaluation; a name that is known already is left as it is.

        Every prompt is sampled once, ahead of training, by engines at `min_version` or later.
        Queue the evaluation of the last version before the last `ack`: after it, without an
        evaluation to generate, the run is over and the workers leave.

        Raises:
            QueueClosed: The run is over.
        """
        self._commits.check_open()
        if not prompts:
            raise InputError(f"evaluate: {name!r} has no prompts, must have at least 1")
        if min_version > (steps := self._book.bounds.steps):
            raise InputError(
                f"evaluate: {name!r} wants min_version = {min_version}, but the last is {steps}"
            )
        if name in self._book.evaluations:
            return
        if self._book.over:
            raise QueueClosed(f"evaluate: {name!r} comes after the end of the run")
        texts = [dump_prompt(prompt) for prompt in prompts]
        run = EvaluationRun(
            name=name, count=len(prompts), temperature=temperature, min_version=min_version
        )
        groups = self._book.evaluate(run, prompts)
        await self._commits.durable(partial(self._ledger.evaluate, run, groups, texts), self._work)

    async def evaluation(self, name: str, timeout: float) -> Evaluation | None:
        """The outcome of an evaluation; long-polls, None if unfinished at the timeout."""
        run = self._book.evaluations.get(name)
        if run is None:
            raise ProtocolError(
                f"evaluation: {name!r} was not queued; known are {[*self._book.evaluations]}"
            )
        return await self._progress.until(lambda: run.outcome() if run.finished else None, timeout)

    # --- the rollout worker

    async def serving(self, engine_id: str, version: int) -> None:
        """The engine samples from this policy version from now on, never again from an older."""
        self._commits.check_open()
        self._book.serving(engine_id, version)
        await self._work.wake()

    async def lease(self, engine_id: str, room: int, timeout: float) -> list[Lease]:
        """Groups to generate; long-polls, empty at the timeout.

        Evaluations come first, then what admission allows at the version that the engine last
        reported. An engine that has reported none gets nothing.

        Args:
            engine_id: Who generates them.
            room: Rollouts that the engine has room for: an evaluation takes 1, a train group
                `group_size`.
            timeout: Seconds.

        Raises:
            QueueClosed: The run is over.
        """
        if room < 1:
            raise ProtocolError(f"lease: room = {room} must be at least 1")
        released = self._released[engine_id]

        def decide() -> tuple[list[Lease], asyncio.Future[None]] | None:
            if self._released[engine_id] != released:
                return None  # who asks is gone; its successor asks by itself
            now, expires = time.monotonic(), self._leases.renewed()
            leases = self._book.lease(engine_id, room, now=now, expires=expires)
            if not leases:
                return None
            return leases, self._commits.submit(partial(self._ledger.lease, engine_id, leases))

        decided = await self._work.until(decide, timeout)
        if decided is None:
            return []
        leases, durable = decided
        self._leases.watch()
        await self._line.wake()
        await durable
        return leases

    async def heartbeat(self, engine_id: str, held: Sequence[tuple[str, int]]) -> list[str]:
        """Renew the leases of (group id, attempt); returns the ids that are lost: abort them."""
        self._commits.check_open()
        lost = []
        for group_id, attempt in held:
            group = self._book.groups.in_flight.get(group_id)
            if group is None or not group.is_from(engine_id, attempt):
                lost.append(group_id)
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
        result = await asyncio.to_thread(schema.summarize, payload)
        self._commits.check_open()
        group = self._book.groups.in_flight.get(result.group_id)
        if group is None or not group.is_leased_to(engine_id, result.attempt):
            return await self._refuse(result.group_id)
        accepted = self._book.accept(group, result, now=time.monotonic())
        tie_filter = self._book.tie_filter
        if accepted.let_through and tie_filter is not None and tie_filter.passed == 1:
            log.warning(
                "batch %d: %d groups without a signal were filtered, the limit"
                " (queues.max_filtered_batches); more of them are trained",
                self._book.version + bool(self._book.taken), tie_filter.dropped,
            )  # fmt: skip

        def record() -> None:
            location = self._journal.append(payload) if group.evaluation is None else None
            self._ledger.accept(result, location, accepted)

        wakes = {
            State.READY: (self._progress,),
            State.SCORED: (self._progress, self._work),
            State.DROPPED: (self._progress, self._work, self._line),
        }
        await self._commits.durable(record, *wakes[accepted.state])
        return PutStatus.ACCEPTED

    async def fail(
        self, engine_id: str, group_id: str, attempt: int, *, reason: str, error: str
    ) -> None:
        """Give a group back: it is redelivered, and after `max_attempts` failed for this reason.

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
        """The batch to train at `version`; long-polls, None at the timeout.

        It is recorded before it is returned: asked again, after a restart too, it is the same.

        Raises:
            QueueClosed: That batch will never come.
            ProtocolError: It is not the turn of that batch.
        """

        def decide() -> asyncio.Future[list[Location]] | None:
            if 0 <= version < self._book.version + bool(self._book.taken):
                return self._commits.submit(partial(self._ledger.locations, version))
            group_ids = self._book.take(version)
            if group_ids is None:
                return None
            return self._commits.submit(partial(self._ledger.take, version, group_ids))

        recorded = await self._progress.until(decide, timeout)
        if recorded is None:
            return None
        payloads = await asyncio.to_thread(self._read, await recorded)
        return Batch(version=version, payloads=payloads)

    async def ack(self, version: int, statistics: Mapping[str, Any]) -> None:
        """The batch of `version` is trained: the learner is at version + 1.

        Repeated, it does nothing.

        Args:
            version: Of the batch.
            statistics: Anything that JSON can hold; kept in the ledger, together with how much
                was left out of training so far, where something may be.

        Raises:
            ProtocolError: That batch is not taken.
            AccountingError: The groups do not add up any more.
        """
        self._commits.check_open()
        if version < self._book.version:
            return
        try:
            text = json.dumps({**statistics, **self._book.selection})
        except (TypeError, ValueError) as error:
            raise InputError(f"statistics of batch {version} are not JSON: {error}") from error
        record = BatchRecord(version=version, acked_at=time.time(), statistics=json.loads(text))
        self._book.ack(record)
        self._book.patience_ends = time.monotonic() + self._patience_seconds
        self._impatience = asyncio.create_task(self._wake_work_later())
        memory = dict(self._book.groups.counts)
        counts = await self._commits.durable(
            partial(self._ledger.ack, version, text),
            self._work,
            self._progress,
            self._line,
        )
        if not account(counts, memory).balanced:
            raise AccountingError(
                f"after batch {version} the groups do not add up: in the ledger {counts},"
                f" in memory {memory}"
            )

    async def commit_checkpoint(self, version: int, path: str) -> None:
        """A checkpoint of `version` is complete on disk at `path`.

        Args:
            version: Batches trained in it.
            path: Its folder, relative to the run's, so that a run that is moved or copied keeps its
                checkpoints. An absolute path is kept as it is.
        """
        self._commits.check_open()
        await self._commits.durable(partial(self._ledger.commit_checkpoint, version, path))
        if self._retention is not None:
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
        if self._impatience is not None:
            self._impatience.cancel()
        await self._commits.close()

    # --- inside

    async def _wake_work_later(self) -> None:
        """Lets engines that still lag when patience ends ask again."""
        await asyncio.sleep(self._patience_seconds)
        await self._work.wake()

    async def _refuse(self, group_id: str) -> PutStatus:
        has_result = await self._commits.submit(partial(self._ledger.refuse, group_id))
        if has_result is None:
            raise ProtocolError(f"put: group {group_id!r} was never issued")
        return PutStatus.DUPLICATE if has_result else PutStatus.FENCED

    def _read(self, locations: Sequence[Location]) -> list[bytes]:
        return [
            read_group(self._journal.directory, place.segment, place.offset) for place in locations
        ]

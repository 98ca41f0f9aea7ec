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
    (a lost or released lease wakes as fail does, close wakes all)

The `book` decides, at once and without awaiting; the `writer` makes it durable; only then is the
caller answered. So a broker that is killed at any moment goes on from its ledger (`recovery`).
"""

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from queues import schema
from queues.accounts import Accounting, account
from queues.admission import Bounds
from queues.book import ENGINE_LOST, UNREACHABLE, BatchRecord, Book
from queues.config import QueuesConfig
from queues.errors import AccountingError, InputError, LedgerError, ProtocolError, QueueClosed
from queues.evaluations import EvaluationRun
from queues.groups import ACCEPTED, Group, State
from queues.journal import Journal, Location, read_group
from queues.ledger import Ledger, dump_prompt
from queues.ledger_tables import JOURNAL_NAME
from queues.long_polls import LongPolls
from queues.records import Batch, Evaluation, Lease, Prompt, PutStatus
from queues.recovery import recover
from queues.status import BrokerStatus, status_of
from queues.writer import Writer

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
    """

    def __init__(
        self,
        directory: Path,
        *,
        config: QueuesConfig,
        groups_per_batch: int,
        group_size: int,
        steps: int,
    ) -> None:
        if group_size < 1:
            raise InputError(f"group_size = {group_size} must be at least 1")
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
        )
        self._lease_seconds = config.lease_seconds
        self._patience_seconds = config.patience_seconds
        self._ledger = Ledger(directory, synchronous=config.synchronous)
        try:
            recover(self._ledger, self._book)
            self._journal = Journal(directory / JOURNAL_NAME, segment_bytes=config.segment_bytes)
        except BaseException:
            self._ledger.close()
            raise
        self._writer = Writer(self._ledger, self._journal, interval=config.commit_interval_seconds)
        self._closed = False
        self._failure: LedgerError | None = None
        self._expiry: asyncio.Task[None] | None = None
        self._impatience: asyncio.Task[None] | None = None
        self._released: Counter[str] = Counter()
        """How often the leases of each engine were taken back."""
        self._work = LongPolls(self._check_open)
        self._progress = LongPolls(self._check_open)
        self._line = LongPolls(self._check_open)

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
            prompts: A group is made of each.
            cursor: Where the source goes on after them.
            last: The source has ended; only then may the last batch be short. If that ends training
                before its last step, evaluations of versions that were not reached end without a
                score, all their prompts failed.
        """
        self._check_open()
        book = self._book
        if book.ended:
            raise ProtocolError("issue: the last prompts were issued before")
        texts = [dump_prompt(prompt) for prompt in prompts]
        groups = book.issue(prompts)
        book.cursor, book.ended = cursor, last
        await self._durable(
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
        self._check_open()
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
        await self._durable(partial(self._ledger.evaluate, run, groups, texts), self._work)

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
        self._check_open()
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
            now = time.monotonic()
            expires = now + self._lease_seconds
            leases = self._book.lease(engine_id, room, now=now, expires=expires)
            if not leases:
                return None
            return leases, self._writer.submit(partial(self._ledger.lease, engine_id, leases))

        decided = await self._work.until(decide, timeout)
        if decided is None:
            return []
        leases, durable = decided
        if self._expiry is None or self._expiry.done():
            self._expiry = asyncio.create_task(self._watch_leases())
        await self._line.wake()
        await durable
        return leases

    async def heartbeat(self, engine_id: str, held: Sequence[tuple[str, int]]) -> list[str]:
        """Renew the leases of (group id, attempt); returns the ids that are lost: abort them."""
        self._check_open()
        lost = []
        for group_id, attempt in held:
            group = self._book.groups.in_flight.get(group_id)
            if group is None or not group.is_from(engine_id, attempt):
                lost.append(group_id)
            else:
                group.expires = time.monotonic() + self._lease_seconds
        return lost

    async def put(self, engine_id: str, payload: bytes) -> PutStatus:
        """Deliver a finished group, made by `schema.encode`.

        An accepted one is durable before the answer, and no second one of that group is ever
        accepted. Evaluation groups are scored instead of kept.

        Raises:
            SchemaError: The payload breaks the schema, or is not what was leased; the lease stays.
            ProtocolError: The group was never issued.
        """
        result = await asyncio.to_thread(schema.summarize, payload)
        self._check_open()
        group = self._book.groups.in_flight.get(result.group_id)
        if group is None or not group.is_leased_to(engine_id, result.attempt):
            return await self._refuse(result.group_id)
        self._book.accept(group, result, now=time.monotonic())

        def record() -> None:
            location = self._journal.append(payload) if group.evaluation is None else None
            self._ledger.accept(result, location)

        await self._durable(record, self._progress, *([self._work] if group.evaluation else []))
        return PutStatus.ACCEPTED

    async def fail(
        self, engine_id: str, group_id: str, attempt: int, *, reason: str, error: str
    ) -> None:
        """Give a group back: it is redelivered, and after `max_attempts` failed for this reason.

        Does nothing where the lease is not, or no longer, the caller's.
        """
        self._check_open()
        # Any text may come with an error, and SQLite takes only what UTF-8 can hold.
        error = error.encode(errors="replace").decode()
        group = self._book.groups.in_flight.get(group_id)
        if group is not None and group.is_leased_to(engine_id, attempt):
            await self._give_back([group], reason, error)

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
        self._check_open()
        self._book.engines.pop(engine_id, None)
        self._released[engine_id] += 1
        held = [group for group in self._book.groups.leased() if group.engine_id == engine_id]
        await self._give_back(held, ENGINE_LOST, f"{engine_id} is gone")
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
                return self._writer.submit(partial(self._ledger.locations, version))
            group_ids = self._book.take(version)
            if group_ids is None:
                return None
            return self._writer.submit(partial(self._ledger.take, version, group_ids))

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
            statistics: Anything that JSON can hold; kept in the ledger.

        Raises:
            ProtocolError: That batch is not taken.
            AccountingError: The groups do not add up any more.
        """
        self._check_open()
        if version < self._book.version:
            return
        try:
            text = json.dumps(dict(statistics))
        except (TypeError, ValueError) as error:
            raise InputError(f"statistics of batch {version} are not JSON: {error}") from error
        record = BatchRecord(version=version, acked_at=time.time(), statistics=json.loads(text))
        self._book.ack(record)
        self._book.patience_ends = time.monotonic() + self._patience_seconds
        self._impatience = asyncio.create_task(self._wake_work_later())
        memory = dict(self._book.groups.counts)
        counts = await self._durable(
            partial(self._ledger.ack, version, text), self._work, self._progress, self._line
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
        self._check_open()
        await self._durable(partial(self._ledger.commit_checkpoint, version, path))

    # --- anyone

    async def accounting(self) -> Accounting:
        """The accounts: the ledger's rows, counted, held against the broker's memory."""
        self._check_open()
        memory = dict(self._book.groups.counts)
        return account(await self._writer.submit(self._ledger.counts), memory)

    async def status(self, after: int = -1) -> BrokerStatus:
        """Where the run is, with the newest batches that were trained later than `after`."""
        return status_of(self._book, after)

    async def close(self) -> None:
        """End every long poll with QueueClosed, and the writing of the ledger.

        Afterwards `ledger.sqlite` is the whole ledger, without its -wal file.
        """
        self._closed = True
        for task in (self._expiry, self._impatience):
            if task is not None:
                task.cancel()
        await self._wake_all()
        await self._writer.close()

    # --- inside

    def _check_open(self) -> None:
        failure = self._failure or self._writer.failure
        if failure is not None:
            raise failure
        if self._closed:
            raise QueueClosed("the broker is closed")

    async def _wake_work_later(self) -> None:
        """Lets engines that still lag when patience ends ask again."""
        await asyncio.sleep(self._patience_seconds)
        await self._work.wake()

    async def _wake_all(self) -> None:
        for polls in (self._work, self._progress, self._line):
            await polls.wake()

    async def _durable(self, change: Callable[[], T], *wakes: LongPolls) -> T:
        """Submit a change that the book has made, wake who waits for it, and wait for the disk.

        What can never be evaluated after it is settled in the same transaction.
        """
        settled = self._book.settle()
        error = f"training ended at version {self._book.version}"
        for name in {group.evaluation for group in settled}:
            log.warning("evaluation %s: %s: %s", name, UNREACHABLE, error)

        def record() -> T:
            result = change()
            for group in settled:
                self._ledger.fail(group.group_id, UNREACHABLE, error)
            return result

        durable = self._writer.submit(record)
        for polls in wakes:
            await polls.wake()
        return await durable

    async def _refuse(self, group_id: str) -> PutStatus:
        state = await self._writer.submit(partial(self._ledger.refuse, group_id))
        if state is None:
            raise ProtocolError(f"put: group {group_id!r} was never issued")
        return PutStatus.DUPLICATE if state in ACCEPTED else PutStatus.FENCED

    async def _give_back(self, groups: Sequence[Group], reason: str, error: str) -> None:
        records: list[Callable[[], None]] = []
        for group in groups:
            state = self._book.give_back(group, reason)
            self._book.last_error = (
                f"group {group.group_id} (prompt {group.prompt.prompt_id}), attempt"
                f" {group.attempt} by {group.engine_id}: {reason}: {error}"
            )
            log.warning("%s; now %s", self._book.last_error, state)
            if state is State.FAILED:
                records.append(partial(self._ledger.fail, group.group_id, reason, error))
            else:
                records.append(partial(self._ledger.redeliver, group.group_id, error))

        def record() -> None:
            for change in records:
                change()

        await self._durable(record, self._work, self._progress, self._line)

    async def _watch_leases(self) -> None:
        """Expire leases; if that fails, nobody may go on waiting for groups that are lost."""
        try:
            await self._expire_leases()
        except Exception as error:
            log.exception("leases cannot expire any more")
            self._failure = LedgerError(f"leases cannot expire, nothing more is served: {error!r}")
            self._failure.__cause__ = error
            await self._wake_all()

    async def _expire_leases(self) -> None:
        """Give back what is leased by workers that are not heard of; ends with the last lease."""
        while leased := self._book.groups.leased():
            now = time.monotonic()
            expired = [group for group in leased if group.expires <= now]
            if expired:
                error = f"no heartbeat for {self._lease_seconds:g} s"
                await self._give_back(expired, "lease_expired", error)
            else:
                await asyncio.sleep(min(group.expires for group in leased) - now)

    def _read(self, locations: Sequence[Location]) -> list[bytes]:
        return [
            read_group(self._journal.directory, place.segment, place.offset) for place in locations
        ]

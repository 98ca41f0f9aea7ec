"""The broker as a Ray actor, and its client for other processes.

The actor stays on the node that made it, since the ledger is on that node's disk. When its process
dies, Ray makes it again from ledger and journal; calls that were lost with it are repeated, and
leases go on. A supervisor ends one that hangs, and counts.
"""

import asyncio
import logging
import math
import sqlite3
import time
import uuid
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from headway.daemon_thread import run_in_daemon_thread
from headway.errors import HeadwayError
from headway.full_disk import SPACE_SECONDS, full_disk_message, has_space, is_full
from headway.metrics import MetricsAccess
from headway.output_limits import keep_logs_small
from headway.ray_process import serve_metrics
from headway.ray_service import (
    GIVE_UP_FACTOR,
    MAX_CONCURRENCY,
    REPEAT_SECONDS,
    START_SECONDS,
    RayService,
    ServiceProcess,
    remote,
    translated,
)
from headway.roles import Role
from queues.broker.broker import Broker
from queues.broker.result_intake import Put
from queues.broker.status import BrokerStatus
from queues.config import QueuesConfig, RunSpec
from queues.errors import BrokerLostError, LedgerError
from queues.records import Batch, Prompt, PutStatus
from queues.schema import to_arrays
from queues.storage.ledger_schema import FILE_NAME
from queues.storage.pause import LONGEST_SECONDS

log = logging.getLogger(__name__)

MESSAGE_BYTES = 32 * 2**20
"""Puts of this size together fill a message."""
LEAST_BYTES_PER_SECOND = 5e6
"""Speed of reading a ledger that a deadline expects, far below that of two slow cores."""
LATE_SECONDS = 1.0
"""An answer that needs no disk and takes longer shows that the broker did nothing meanwhile."""
SCRAPE_SECONDS = 5.0
"""Deadline of a scrape's question to the broker."""


def reading_seconds(directory: Path) -> float:
    """Return the seconds that a broker may take to verify and recover the ledger of a run."""
    ledger = directory / FILE_NAME
    files = [file for file in (ledger, ledger.with_name(f"{FILE_NAME}-wal")) if file.exists()]
    return sum(file.stat().st_size for file in files) / LEAST_BYTES_PER_SECOND


def create_broker(
    directory: Path,
    *,
    config: QueuesConfig,
    spec: RunSpec,
    session: str | None = None,
    start_seconds: float = START_SECONDS,
) -> "BrokerClient":
    """Start the broker of a run on this node; for the arguments see `Broker`.

    Raises what `Broker` raises, or BrokerLostError if it does not start within `start_seconds`, for
    a new process, and `reading_seconds`.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {"num_cpus": 0, "max_restarts": -1, "max_concurrency": MAX_CONCURRENCY}
    actor = (
        ray.remote(BrokerActor)
        .options(**options, scheduling_strategy=here)
        .remote(directory, config=config, spec=spec, session=session, owner=uuid.uuid4().hex)
    )
    client = BrokerClient(actor, directory=directory, backup=spec.backup)
    deadline = time.monotonic() + start_seconds + reading_seconds(directory)
    while True:
        try:
            ray.get(actor.opened.remote(), timeout=max(0.0, deadline - time.monotonic()))
        except ActorUnavailableError:  # its process died, and is started again
            time.sleep(REPEAT_SECONDS)
        except GetTimeoutError as error:
            client.stop()
            raise BrokerLostError(
                f"create_broker: the broker did not start within {start_seconds:.0f} s, the size of"
                f" {directory / FILE_NAME} allowed for"
            ) from error
        except RayError as error:
            raise translated(error, "the broker's process", BrokerLostError) from error
        else:
            return client


class BrokerActor(Broker, ServiceProcess):
    """The broker in a process of its own.

    An error of its constructor is kept, and raised by `opened`: Ray would turn it into text.
    """

    def __init__(self, directory: Path, **options: Any) -> None:
        keep_logs_small()
        self._error: HeadwayError | None = None
        again = ray.get_runtime_context().was_current_actor_reconstructed
        if again:
            # A process that was killed keeps its lock until its disk answers.
            self.predecessor_seconds = LONGEST_SECONDS
        while True:
            if again and not has_space(directory):
                log.warning("paused: %s", full_disk_message(directory))
                while not has_space(directory):  # callers wait for the constructor meanwhile
                    time.sleep(SPACE_SECONDS)
            try:
                super().__init__(directory, **options)
            except (HeadwayError, sqlite3.Error) as error:
                if again and is_full(error, directory):  # others have taken the space since
                    time.sleep(SPACE_SECONDS)
                    continue
                self._error = error if isinstance(error, HeadwayError) else LedgerError(f"{error}")
            return

    def __repr__(self) -> str:
        return Role.BROKER.value

    async def opened(self) -> None:
        """Raise the error of the constructor, if there was one."""
        if self._error is not None:
            raise self._error
        self.commits.check_open()

    async def put_many(self, puts: Sequence[Put]) -> list[PutStatus | HeadwayError]:
        """Call `ResultIntake.put_many` with payloads that `to_arrays` made, read in place."""
        return await self.intake.put_many([(engine_id, memoryview(x)) for engine_id, x in puts])

    async def take(self, version: int, timeout: float, *, epoch: int = 0) -> Batch | None:
        """Implement `BatchQueue.take`, with payloads made by `to_arrays`."""
        batch = await super().take(version, timeout, epoch=epoch)
        return batch and replace(batch, payloads=to_arrays(batch.payloads))

    async def serve_metrics(self, access: MetricsAccess) -> str:
        """Serve `BrokerMetrics` until the process ends; return its host:port."""
        from queues.broker.metrics import BrokerMetrics

        loop = asyncio.get_running_loop()

        def status() -> BrokerStatus:
            return asyncio.run_coroutine_threadsafe(self.status(), loop).result(SCRAPE_SECONDS)

        return serve_metrics([BrokerMetrics(status)], access)


class BrokerClient(RayService):
    """The calls of `queues.protocols`, over Ray; can be sent to other Ray actors.

    While the broker pauses (`Broker.paused`), calls that need its disk wait as long as it does. A
    call that is given up may still take effect: a lease whose answer nobody received expires.

    `directory` and `backup` are folders whose disks the broker needs in order to start.
    """

    role, lost = Role.BROKER, BrokerLostError

    def __init__(
        self,
        *client: Any,
        directory: Path | None = None,
        backup: Path | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*client, **options)
        self._directory, self._backup = directory, backup
        self._outbox: deque[tuple[Put, asyncio.Future[PutStatus]]] = deque()
        self._sending: asyncio.Task[None] | None = None

    prompts_wanted = remote(Broker.prompts_wanted, wait=lambda timeout: timeout)
    cursor = remote(Broker.cursor)
    evaluate = remote(Broker.evaluate)
    evaluation = remote(Broker.evaluation, wait=lambda name, timeout: timeout)

    serving = remote(Broker.serving)
    lease = remote(Broker.lease, wait=lambda engine_id, capacity, timeout, purpose=None: timeout)
    save = remote(Broker.save)
    note = remote(Broker.note)
    fail = remote(Broker.fail)
    release = remote(Broker.release)

    begin_learner = remote(Broker.begin_learner)
    ack = remote(Broker.ack, fenced=True)
    commit_checkpoint = remote(Broker.commit_checkpoint, fenced=True)

    accounting = remote(Broker.accounting)
    status = remote(Broker.status)
    paused = remote(Broker.paused)
    resize = remote(Broker.resize)
    serve_metrics = remote(BrokerActor.serve_metrics)
    close = remote(Broker.close)

    _issue = remote(Broker.issue)
    _put_many = remote(BrokerActor.put_many)
    _take = remote(BrokerActor.take, fenced=True, wait=lambda version, timeout, *, epoch=0: timeout)

    async def issue(
        self, prompts: Sequence[Prompt], *, cursor: str, last: bool = False, token: str = ""
    ) -> None:
        """Implement `PromptFeed.issue`; every call has a token, so that it may be repeated."""
        await self._issue(prompts, cursor=cursor, last=last, token=token or uuid.uuid4().hex)

    async def put(self, engine_id: str, payload: bytes) -> PutStatus:
        """Implement `WorkQueue.put`; puts made while an answer is pending share a message."""
        answer: asyncio.Future[PutStatus] = asyncio.get_running_loop().create_future()
        self._outbox.append(((engine_id, payload), answer))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())
        return await answer

    async def heartbeat(
        self, engine_id: str, held: Collection[tuple[str, int]]
    ) -> list[tuple[str, int]]:
        """Implement `WorkQueue.heartbeat`; `held` is read again if the call is repeated."""

        def send() -> Any:
            return self.handle.heartbeat.remote(engine_id, [*held])

        lost: list[tuple[str, int]] = await self.repeat("heartbeat", send)
        return lost

    async def take(self, version: int, timeout: float) -> Batch | None:
        """Implement `BatchQueue.take`; the payloads are read where Ray keeps them."""
        batch = await self._take(version, timeout)
        return batch and replace(batch, payloads=[memoryview(x) for x in batch.payloads])

    async def start(self, *, again: bool = False) -> None:
        """Wait until the broker works, for the first time or `again`; raise why it cannot.

        Raises TimeoutError if it takes longer than START_SECONDS and the time for its ledger,
        counted from when its disks have space.
        """
        seconds = START_SECONDS + (reading_seconds(self._directory) if self._directory else 0.0)
        opened = asyncio.ensure_future(self.call("opened", wait=math.inf))
        try:
            async with asyncio.timeout(seconds) as deadline:
                while not (await asyncio.wait([opened], timeout=SPACE_SECONDS))[0]:
                    if again and not await self._has_space():
                        deadline.reschedule(asyncio.get_running_loop().time() + seconds)
                opened.result()
        finally:
            opened.cancel()

    async def _has_space(self) -> bool:
        folders = [folder for folder in (self._directory, self._backup) if folder is not None]
        return await run_in_daemon_thread(lambda: all(map(has_space, folders)))

    async def explained(self, error: RayError) -> Exception:
        """Return what a failed call raises: of a broker without a ledger, why it has none."""
        if isinstance(error, RayTaskError) and not isinstance(error.cause, HeadwayError):
            try:
                await self.handle.opened.remote()
            except RayError as unopened:
                return await super().explained(unopened)
        return await super().explained(error)

    async def is_excused(self, method: str) -> bool:
        """Return True if the broker has a reason to answer late: its disk, or its own restart.

        While its constructor runs again, Ray keeps calls: a late answer tells of that.
        """
        began, seconds = time.monotonic(), GIVE_UP_FACTOR * self._answer_seconds
        try:
            async with asyncio.timeout(seconds):
                paused = await self.handle.paused.remote()
        except TimeoutError as error:
            raise self.unanswered(method, seconds) from error
        return paused is not None or time.monotonic() - began > LATE_SECONDS

    async def _send(self) -> None:
        """Send the outbox, message after message, until it is empty."""
        while self._outbox:
            await asyncio.sleep(0)  # puts of other tasks at this moment join the message
            puts: list[Put] = []
            futures: list[asyncio.Future[PutStatus]] = []
            size = 0
            while self._outbox and (not puts or size < MESSAGE_BYTES):
                put, future = self._outbox.popleft()
                puts.append(put)
                futures.append(future)
                size += len(put[1])
            engines, payloads = zip(*puts, strict=True)
            try:
                answers: Sequence[PutStatus | Exception] = await self._put_many(
                    list(zip(engines, to_arrays(payloads), strict=True))
                )
            except Exception as error:  # noqa: BLE001  (raised in every caller)
                answers = [error] * len(puts)
            for future, answer in zip(futures, answers, strict=True):
                if future.done():
                    continue  # its caller was cancelled
                if isinstance(answer, Exception):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)

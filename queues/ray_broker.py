"""The broker as a Ray actor, and its client for other processes.

The actor stays on the node that made it, since the ledger is on that node's disk. When its process
dies, Ray makes it again from ledger and journal; calls that were lost with it are repeated, and
leases go on. A supervisor ends one that hangs, and counts.
"""

import asyncio
import functools
import inspect
import logging
import math
import sqlite3
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Concatenate, Never, ParamSpec, Self, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from headway.daemon_thread import run_in_daemon_thread
from headway.errors import HeadwayError
from headway.full_disk import full_disk_message, has_space, is_full
from headway.metrics import MetricsAccess
from headway.output_limits import keep_logs_small
from queues.broker.broker import Broker
from queues.broker.result_intake import Put
from queues.broker.status import BrokerStatus
from queues.config import QueuesConfig, RunSpec
from queues.errors import BrokerLostError, LedgerError
from queues.ray_errors import raise_translated, until_death
from queues.records import Batch, Prompt, PutStatus
from queues.schema import to_arrays
from queues.storage.ledger_schema import FILE_NAME
from queues.storage.pause import LONGEST_SECONDS

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

MAX_CONCURRENCY = 10_000
"""Long polls that may be open at once."""
ANSWER_SECONDS = 30.0
"""Time after which a call is sent again, beyond the timeout that it asks for."""
MESSAGE_BYTES = 32 * 2**20
"""Puts of this size together fill a message."""
LEAST_BYTES_PER_SECOND = 5e6
"""Speed of reading a ledger that a deadline expects, far below that of two slow cores."""
START_SECONDS = 120.0
"""Time for the broker's process to start, beyond that for its ledger."""
RESTART_FACTOR = 20.0
"""A call is given up after so many times ANSWER_SECONDS without an answer."""
REPEAT_SECONDS = 0.2
"""Wait before a call is repeated whose broker is being made again."""
SPACE_SECONDS = 1.0
"""Interval between probes of a disk that may be full when the broker is made again."""
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
    deadline = time.monotonic() + start_seconds + reading_seconds(directory)
    while True:
        try:
            ray.get(actor.opened.remote(), timeout=max(0.0, deadline - time.monotonic()))
        except ActorUnavailableError:  # its process died, and is started again
            time.sleep(REPEAT_SECONDS)
        except GetTimeoutError as error:
            ray.kill(actor)
            raise BrokerLostError(
                f"create_broker: the broker did not start within {start_seconds:.0f} s, the size of"
                f" {directory / FILE_NAME} allowed for"
            ) from error
        except RayError as error:
            raise_translated(error)
        else:
            return BrokerClient(actor, directory=directory, backup=spec.backup)


class BrokerActor(Broker):
    """The broker in a process of its own; every call raises the error of its constructor.

    Ray itself would turn that error into text.
    """

    _error: HeadwayError | None = None

    def __init__(self, directory: Path, **options: Any) -> None:
        keep_logs_small()
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

    def __getattr__(self, name: str) -> Never:
        """Raise the error of the constructor in the place of what it did not make."""
        if self._error is None or name.startswith("__"):
            raise AttributeError(f"the broker has no attribute {name!r}")
        raise self._error

    def __repr__(self) -> str:
        return "broker"

    async def opened(self) -> None:
        """Raise the error of the constructor."""
        self.commits.check_open()

    async def live(self) -> None:
        """Never return: the call fails when the process dies."""
        await asyncio.Event().wait()

    async def put_many(self, puts: Sequence[Put]) -> list[PutStatus | HeadwayError]:
        """Call `ResultIntake.put_many` with payloads that `to_arrays` made, read in place."""
        return await self.intake.put_many([(engine_id, memoryview(x)) for engine_id, x in puts])

    async def take(self, version: int, timeout: float, *, epoch: int = 0) -> Batch | None:
        """Implement `BatchQueue.take`, with payloads made by `to_arrays`."""
        batch = await super().take(version, timeout, epoch=epoch)
        return batch and replace(batch, payloads=to_arrays(batch.payloads))

    async def serve_metrics(self, access: MetricsAccess) -> str:
        """Serve `BrokerMetrics` until the process ends; return its host:port."""
        from headway.metrics import public_address, serve
        from queues.broker.metrics import BrokerMetrics

        loop = asyncio.get_running_loop()

        def status() -> BrokerStatus:
            return asyncio.run_coroutine_threadsafe(self.status(), loop).result(SCRAPE_SECONDS)

        port = serve([BrokerMetrics(status)], access)
        return public_address(access.host, port, ray.util.get_node_ip_address())


def _remote(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["BrokerClient", P], Coroutine[Any, Any, T]]:
    """Make the client's method for a method of the actor, with the same static type.

    The deadline of a call is extended by its argument `timeout`, if it has one. A keyword argument
    `epoch` is that of the client.
    """
    parameters = inspect.signature(method).parameters
    names = [*parameters][1:]
    is_fenced = "epoch" in names and parameters["epoch"].kind is inspect.Parameter.KEYWORD_ONLY

    @functools.wraps(method)
    async def call(client: "BrokerClient", /, *args: P.args, **options: P.kwargs) -> T:
        arguments: dict[str, Any] = dict(zip(names, args, strict=False)) | options
        epoch = {"epoch": client.epoch} if client.epoch and is_fenced else {}

        def send() -> Any:
            return getattr(client.handle, method.__name__).remote(*args, **options, **epoch)

        answer: T = await client.answer(method.__name__, send, arguments.get("timeout", 0.0))
        return answer

    return call


class BrokerClient:
    """The calls of `queues.protocols`, over Ray; can be sent to other Ray actors.

    Every method raises what the broker raised, or BrokerLostError if the broker is gone for good or
    gives no answer for RESTART_FACTOR times `answer_seconds` (long polls: beyond their timeout). A
    call is sent again when the broker was made again, and every `answer_seconds` while the broker
    answers others but not this call; each may be repeated without harm. While the broker pauses
    (`Broker.paused`), calls that need its disk wait as long as it does.

    A call that is given up may still take effect: a lease whose answer nobody received expires.
    """

    def __init__(
        self,
        handle: Any,
        answer_seconds: float = ANSWER_SECONDS,
        epoch: int = 0,
        *,
        directory: Path | None = None,
        backup: Path | None = None,
    ) -> None:
        self.handle, self._directory, self._backup = handle, directory, backup
        self.epoch = epoch
        """That of the learner which uses this client."""
        self._answer_seconds = answer_seconds
        self._outbox: deque[tuple[Put, asyncio.Future[PutStatus]]] = deque()
        self._sending: asyncio.Task[None] | None = None

    def __reduce__(self) -> tuple[type[Self], tuple[Any, float, int]]:
        return type(self), (self.handle, self._answer_seconds, self.epoch)

    def of_epoch(self, epoch: int) -> "BrokerClient":
        """Return the client of a learner that was made again."""
        return BrokerClient(self.handle, self._answer_seconds, epoch)

    prompts_wanted = _remote(Broker.prompts_wanted)
    cursor = _remote(Broker.cursor)
    evaluate = _remote(Broker.evaluate)
    evaluation = _remote(Broker.evaluation)

    serving = _remote(Broker.serving)
    lease = _remote(Broker.lease)
    save = _remote(Broker.save)
    fail = _remote(Broker.fail)
    release = _remote(Broker.release)

    begin_learner = _remote(Broker.begin_learner)
    ack = _remote(Broker.ack)
    commit_checkpoint = _remote(Broker.commit_checkpoint)

    accounting = _remote(Broker.accounting)
    status = _remote(Broker.status)
    paused = _remote(Broker.paused)
    resize = _remote(Broker.resize)
    serve_metrics = _remote(BrokerActor.serve_metrics)
    close = _remote(Broker.close)

    _issue = _remote(Broker.issue)
    _put_many = _remote(BrokerActor.put_many)
    _take = _remote(BrokerActor.take)

    async def issue(
        self,
        prompts: Sequence[Prompt],
        *,
        cursor: str,
        last: bool = False,
        token: str | None = None,
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

        lost: list[tuple[str, int]] = await self.answer("heartbeat", send, 0.0)
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
        opened = asyncio.ensure_future(self.answer("opened", self.handle.opened.remote, math.inf))
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

    async def live(self) -> None:
        """Wait for the death of the process, which Ray restarts; raise its error then."""
        await until_death(self.handle.live.remote())

    async def ping(self) -> None:
        """Wait for an answer; raise an error at once if the broker's process is gone."""
        await until_death(self.handle.paused.remote())

    def stop(self, *, again: bool = False) -> None:
        """End the process for good, or so that Ray starts it `again`."""
        ray.kill(self.handle, no_restart=not again)

    async def answer(self, name: str, send: Callable[[], Any], timeout: float) -> Any:
        """Send a call of method `name`, as often as its broker dies, and return its answer.

        The call may wait for `timeout` seconds. While the broker is made again, Ray says so, until
        its supervisor ends the actor. If only this call has no answer, Ray may have lost it.
        """
        longest, waited = timeout + RESTART_FACTOR * self._answer_seconds, 0.0
        while True:
            try:
                return await self._answer_of_one(name, send(), timeout)
            except ActorUnavailableError:
                await asyncio.sleep(REPEAT_SECONDS)
            except RayError as error:
                raise_translated(error)
            except TimeoutError as error:
                waited += timeout + self._answer_seconds  # without the time of pauses
                if waited > longest:
                    text = f"{name}: the broker did not answer within {longest:g} s"
                    raise BrokerLostError(text) from error
                log.warning("%s: the broker answers others; the call is sent again", name)

    async def _answer_of_one(self, name: str, pending: Any, timeout: float) -> Any:
        """Return or raise what a pending call does; TimeoutError if nothing tells why it waits."""
        call = asyncio.ensure_future(pending)
        try:
            while True:
                if (await asyncio.wait([call], timeout=timeout + self._answer_seconds))[0]:
                    return call.result()
                if not await self._is_paused(name) and not call.done():
                    raise TimeoutError
        finally:
            call.cancel()

    async def _is_paused(self, name: str) -> bool:
        """Return True if the broker has a reason to answer late: its disk, or its own restart.

        While its constructor runs again, Ray keeps calls: a late answer tells of that.
        """
        began, seconds = time.monotonic(), RESTART_FACTOR * self._answer_seconds
        try:
            async with asyncio.timeout(seconds):
                paused = await self.handle.paused.remote()
        except TimeoutError as error:
            text = f"{name}: the broker did not answer within {seconds:g} s"
            raise BrokerLostError(text) from error
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

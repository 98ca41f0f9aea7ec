"""The broker as a Ray actor, and a client with the same methods.

The actor is `Broker` itself: Ray runs its coroutines concurrently in one event loop, which is what
it was written for. Payloads travel through Ray's object store. The actor stays on the node that
made it, since the ledger lies on that node's disk, and Ray never restarts it by itself: engines
would have to report their versions again, so a supervisor decides.

Every call ends: a broker that does not answer in time counts as lost, unless it says that it waits
for room on its disk.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from queues.broker.broker import Broker
from queues.broker.status import BrokerStatus
from queues.config import QueuesConfig
from queues.errors import BrokerLostError, QueuesError
from queues.readers.accounting import Accounting
from queues.records import Batch, Evaluation, Lease, Payload, Prompt, Purpose, PutStatus
from queues.runtime.ray_payloads import to_arrays

P = ParamSpec("P")
T = TypeVar("T")

Put = tuple[tuple[str, bytes], "asyncio.Future[PutStatus]"]
"""Engine and payload, and who waits for the answer."""

MAX_CONCURRENCY = 10_000
"""Long polls that may be open at once."""
ANSWER_SECONDS = 30.0
"""How long a call may take beyond the wait that it asks for."""
MESSAGE_BYTES = 32 * 2**20
"""Puts of this size together fill a message."""
SCRAPE_SECONDS = 5.0
"""How long a scrape waits for the broker's status."""
START_SECONDS = 120.0
"""How long the broker may take to start: a new process, and a long ledger to recover."""


def create_broker(
    directory: Path,
    *,
    config: QueuesConfig,
    groups_per_batch: int,
    group_size: int,
    steps: int,
    greedy_baseline: bool = False,
    pass_rate_cap: float | None = None,
    pass_threshold: float = 1.0,
) -> "BrokerClient":
    """Start the broker of a run on this node; arguments as of `Broker`.

    Raises:
        QueuesError: What `Broker` raises, e.g. InputError or LedgerError; BrokerLostError where it
            does not start within START_SECONDS.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = (
        ray.remote(_BrokerActor)
        .options(
            num_cpus=0, max_restarts=0, max_concurrency=MAX_CONCURRENCY, scheduling_strategy=here
        )
        .remote(
            directory,
            config=config,
            groups_per_batch=groups_per_batch,
            group_size=group_size,
            steps=steps,
            greedy_baseline=greedy_baseline,
            pass_rate_cap=pass_rate_cap,
            pass_threshold=pass_threshold,
        )
    )
    try:
        ray.get(actor.opened.remote(), timeout=START_SECONDS)
    except GetTimeoutError as error:
        ray.kill(actor)
        raise BrokerLostError(
            f"create_broker: the broker did not start within {START_SECONDS:g} s"
        ) from error
    except RayError as error:
        raise _translate(error) from error
    return BrokerClient(actor)


class _BrokerActor(Broker):
    """The broker; keeps what its constructor refuses, which Ray would turn into text."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._refusal: QueuesError | None = None
        try:
            super().__init__(*args, **options)
        except QueuesError as error:
            self._refusal = error

    def __repr__(self) -> str:
        return "broker"

    async def put_many(self, puts: Sequence[tuple[str, Payload]]) -> list[PutStatus | QueuesError]:
        """See `Puts.put_many`; payloads as `share` made them, read where Ray keeps them."""
        return await super().put_many([(engine_id, memoryview(x)) for engine_id, x in puts])

    async def take(self, version: int, timeout: float) -> Batch | None:
        """See `Batches.take`; payloads as `share` makes them."""
        batch = await super().take(version, timeout)
        return batch and replace(batch, payloads=to_arrays(batch.payloads))

    async def opened(self) -> None:
        """Raise what the constructor refused."""
        if self._refusal is not None:
            raise self._refusal

    async def serve_metrics(self, host: str) -> str:
        """Show `metrics.BrokerMetrics` until the process ends; host:port."""
        from queues.broker.metrics import BrokerMetrics
        from queues.runtime.prometheus import public_address, serve

        loop = asyncio.get_running_loop()

        def status() -> BrokerStatus:
            return asyncio.run_coroutine_threadsafe(self.status(), loop).result(SCRAPE_SECONDS)

        port = serve([BrokerMetrics(status)], host=host)
        return public_address(host, port, ray.util.get_node_ip_address())


class BrokerClient:
    """`Broker`'s methods, called over Ray; can be sent to other Ray actors.

    Every method raises what the broker raised, or BrokerLostError where it cannot be reached or
    does not answer within ANSWER_SECONDS (long polls: beyond their own timeout). While the broker
    pauses (`BrokerStatus.paused`), calls that need its disk wait as long as it does.

    A call that is given up or cancelled may still take effect in the broker. Nothing is lost by it:
    a lease whose answer nobody received gets no heartbeat, so it expires and is redelivered; a put
    that was accepted is answered `duplicate` when repeated, and a take is the same when repeated.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._outbox: deque[Put] = deque()
        self._sending: asyncio.Task[None] | None = None

    def __reduce__(self) -> tuple[type[Self], tuple[Any]]:
        return type(self), (self._actor,)

    @property
    def handle(self) -> Any:
        """Of the broker's process in Ray."""
        return self._actor

    async def prompts_wanted(self, timeout: float) -> int:
        """See `Broker.prompts_wanted`."""
        return await self._poll(timeout, Broker.prompts_wanted, timeout)

    async def issue(self, prompts: Sequence[Prompt], *, cursor: str, last: bool = False) -> None:
        """See `Broker.issue`."""
        await self._call(Broker.issue, prompts, cursor=cursor, last=last)

    async def cursor(self) -> str | None:
        """See `Broker.cursor`."""
        return await self._call(Broker.cursor)

    async def evaluate(
        self, name: str, prompts: Sequence[Prompt], *, temperature: float, min_version: int
    ) -> None:
        """See `Broker.evaluate`."""
        await self._call(
            Broker.evaluate, name, prompts, temperature=temperature, min_version=min_version
        )

    async def evaluation(self, name: str, timeout: float) -> Evaluation | None:
        """See `Broker.evaluation`."""
        return await self._poll(timeout, Broker.evaluation, name, timeout)

    async def serving(self, engine_id: str, version: int) -> None:
        """See `Broker.serving`."""
        await self._call(Broker.serving, engine_id, version)

    async def lease(
        self, engine_id: str, room: int, timeout: float, purpose: Purpose | None = None
    ) -> list[Lease]:
        """See `Broker.lease`."""
        return await self._poll(timeout, Broker.lease, engine_id, room, timeout, purpose)

    async def heartbeat(
        self, engine_id: str, held: Sequence[tuple[str, int]]
    ) -> list[tuple[str, int]]:
        """See `Broker.heartbeat`."""
        return await self._call(Broker.heartbeat, engine_id, held)

    async def put(self, engine_id: str, payload: bytes) -> PutStatus:
        """See `Broker.put`; what is put while an answer is on its way goes in one message."""
        answered: asyncio.Future[PutStatus] = asyncio.get_running_loop().create_future()
        self._outbox.append(((engine_id, payload), answered))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())
        return await answered

    async def put_many(self, puts: Sequence[tuple[str, Payload]]) -> list[PutStatus | QueuesError]:
        """See `Broker.put_many`."""
        shared = to_arrays([payload for _, payload in puts])
        engines = (engine_id for engine_id, _ in puts)
        return await self._call(Broker.put_many, list(zip(engines, shared, strict=True)))

    async def save(self, engine_id: str, payload: bytes) -> None:
        """See `Broker.save`."""
        await self._call(Broker.save, engine_id, payload)

    async def fail(
        self, engine_id: str, group_id: str, attempt: int, *, reason: str, error: str
    ) -> None:
        """See `Broker.fail`."""
        await self._call(Broker.fail, engine_id, group_id, attempt, reason=reason, error=error)

    async def release(self, engine_id: str) -> int:
        """See `Broker.release`."""
        return await self._call(Broker.release, engine_id)

    async def take(self, version: int, timeout: float) -> Batch | None:
        """See `Broker.take`."""
        batch = await self._poll(timeout, Broker.take, version, timeout)
        return batch and replace(batch, payloads=[memoryview(each) for each in batch.payloads])

    async def ack(self, version: int, statistics: Mapping[str, Any]) -> None:
        """See `Broker.ack`."""
        await self._call(Broker.ack, version, statistics)

    async def commit_checkpoint(self, version: int, path: str) -> None:
        """See `Broker.commit_checkpoint`."""
        await self._call(Broker.commit_checkpoint, version, path)

    async def accounting(self) -> Accounting:
        """See `Broker.accounting`."""
        return await self._call(Broker.accounting)

    async def status(self, after: int = -1) -> BrokerStatus:
        """See `Broker.status`."""
        return await self._call(Broker.status, after)

    async def serve_metrics(self, host: str) -> str:
        """Show metrics of the broker at this address of its node; host:port."""
        return await self._poll(0.0, _BrokerActor.serve_metrics, host)

    async def close(self) -> None:
        """See `Broker.close`; the actor itself lives until its handles are gone."""
        await self._call(Broker.close)

    async def _send(self) -> None:
        """Put what waits, message after message, until nothing does."""
        while self._outbox:
            await asyncio.sleep(0)  # whoever puts at this moment comes along
            message: list[Put] = []
            size = 0
            while self._outbox and (not message or size < MESSAGE_BYTES):
                message.append(self._outbox.popleft())
                size += len(message[-1][0][1])
            try:
                answers: Sequence[PutStatus | Exception] = await self.put_many(
                    [put for put, _ in message]
                )
            except Exception as error:  # noqa: BLE001  (each caller is told)
                answers = [error] * len(message)
            for (_, answered), answer in zip(message, answers, strict=True):
                if answered.done():
                    continue  # its caller was cancelled
                if isinstance(answer, Exception):
                    answered.set_exception(answer)
                else:
                    answered.set_result(answer)

    async def _call(
        self,
        method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
        *args: P.args,
        **options: P.kwargs,
    ) -> T:
        return await self._poll(0.0, method, *args, **options)

    async def _poll(
        self,
        wait: float,
        method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
        *args: P.args,
        **options: P.kwargs,
    ) -> T:
        """What a call returns or raises that waits for up to `wait` seconds by itself."""
        name, seconds = method.__name__, wait + ANSWER_SECONDS
        call = asyncio.ensure_future(_answer(getattr(self._actor, name).remote(*args, **options)))
        try:
            while True:
                done, _ = await asyncio.wait([call], timeout=seconds)
                if done:
                    answer: T = call.result()
                    return answer
                if not await self._pauses():
                    raise BrokerLostError(f"{name}: the broker did not answer within {seconds:g} s")
        except RayError as error:
            raise _translate(error) from error
        finally:
            call.cancel()

    async def _pauses(self) -> bool:
        """Whether the broker lives, and answers late because the disk is full."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                status: BrokerStatus = await self._actor.status.remote()
        except TimeoutError:
            return False
        return status.paused is not None


async def _answer(reference: Any) -> Any:
    return await reference


def _translate(error: RayError) -> Exception:
    """Our own exception inside Ray's, or BrokerLostError; a bug in the broker stays as it is."""
    cause: Any = error.cause if isinstance(error, RayTaskError) else error.__cause__
    if isinstance(cause, QueuesError):
        return cause
    if isinstance(error, RayActorError):
        return BrokerLostError(f"the broker's process is gone: {error}")
    foreign: Exception = error
    return foreign

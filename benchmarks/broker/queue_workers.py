"""Brokers, producers and a consumer for the benchmarks of the broker."""

import asyncio
import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.queue import Empty, Queue

from benchmarks.harness.synthetic_load import make_rollout
from headway import clock
from headway.ray_service import MAX_CONCURRENCY
from queues.config import QueuesConfig, RunSpec
from queues.ray_broker import BrokerActor, BrokerClient
from queues.records import Batch, Lease, Prompt, Purpose, PutStatus, RolloutGroup
from queues.schema import encode, to_arrays
from weight_sync.manifest import Bucket, Manifest, TensorSpec
from weight_sync.ray_broadcaster import BroadcasterClient

GROUP_SIZE = 8
BATCH = 32
WINDOW = 2048
"""Groups that may be live: more than are ever waited for."""
POLL_SECONDS = 2.0
FOREVER = 10**6
"""Steps, and η where weights play no part."""


def groups_at_once(tokens: int) -> int:
    """Return how many groups an actor generates at once: 256 rollouts, or 512,000 tokens."""
    return min(32, 64_000 // tokens)


def prompt_id(number: int) -> str:
    """Return an id; all have one length, so that one payload can be made from another."""
    return f"bench/0/{number:08d}"


def make_lease(number: int, deadline: int = FOREVER) -> Lease:
    return Lease(
        group_id=f"g{number:08d}",
        attempt=1,
        prompt=Prompt(prompt_id=prompt_id(number), text="1+1="),
        group_size=GROUP_SIZE,
        purpose=Purpose.TRAIN,
        temperature=None,
        start_version=0,
        deadline_version=deadline,
    )


def template(tokens: int) -> bytes:
    """Return the payload of group 0: GROUP_SIZE rollouts of so many tokens."""
    rollouts = [
        make_rollout(list(range(tokens)), index, prompt_length=3) for index in range(GROUP_SIZE)
    ]
    return encode(
        RolloutGroup(group_id="g00000000", prompt_id=prompt_id(0), attempt=1, rollouts=rollouts)
    )


def payload_of(lease: Lease, template: bytes) -> bytes:
    """Return a template as the result of a lease; the work of encoding is not measured."""
    renamed = template.replace(b"g00000000", lease.group_id.encode())
    return renamed.replace(prompt_id(0).encode(), lease.prompt.prompt_id.encode())


def manifest(version: int) -> Manifest:
    """Return a version of one small tensor, made now."""
    spec = TensorSpec(name="w", dtype="float32", shape=(16,), bucket=0, offset=0)
    return Manifest(
        version=version,
        tensors=(spec,),
        buckets=(Bucket(nbytes=64, checksum="0" * 32, location="nowhere"),),
        created_at=clock.now(),
    )


class CountedBroker(BrokerActor):
    """The broker, with a count of the syncs of its journal."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.syncs, fdatasync = 0, os.fdatasync

        def counted(file: Any) -> None:
            self.syncs += 1
            fdatasync(file)

        vars(os)["fdatasync"] = counted

    async def vitals(self) -> tuple[int, int]:
        """Return the number of syncs so far, and the id of the process."""
        return self.syncs, os.getpid()


class EmptyBroker:
    """Answers what the broker would, without keeping, checking or deciding anything."""

    def __init__(self, tokens: int) -> None:
        self._payload = template(tokens)
        self._issued = self._leased = self._put = self._wanted = 0
        self._queue_is_short, self._batch_is_ready = asyncio.Event(), asyncio.Event()
        self._queue_is_short.set()

    async def prompts_wanted(self, timeout: float) -> int:
        """Ask for a window of prompts whenever the queue is short."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._queue_is_short.wait(), timeout)
            self._queue_is_short.clear()
            return WINDOW
        return 0

    async def issue(self, prompts: Sequence[Prompt], *, cursor: str, last: bool = False) -> None:
        """See `Broker.issue`."""
        self._issued += len(prompts)

    async def serving(self, engine_id: str, version: int) -> None:
        """See `Broker.serving`."""

    async def lease(self, engine_id: str, capacity: int, timeout: float) -> list[Lease]:
        """See `Broker.lease`; never empty."""
        first = self._leased + 1
        self._leased += capacity // GROUP_SIZE
        if self._issued - self._leased < WINDOW:
            self._queue_is_short.set()
        return [make_lease(number) for number in range(first, self._leased + 1)]

    async def put_many(self, puts: Sequence[tuple[str, bytes]]) -> list[PutStatus]:
        """See `Broker.put_many`."""
        self._put += len(puts)
        if self._put >= self._wanted:
            self._batch_is_ready.set()
        return [PutStatus.ACCEPTED] * len(puts)

    async def take(self, version: int, timeout: float) -> Batch | None:
        """See `Broker.take`; equal payloads, each of which travels."""
        self._wanted = (version + 1) * BATCH
        self._batch_is_ready.clear()
        if self._put < self._wanted:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._batch_is_ready.wait(), timeout)
        if self._put < self._wanted:
            return None
        return Batch(version=version, payloads=to_arrays([self._payload] * BATCH))

    async def ack(self, version: int, statistics: Any) -> None:
        """See `Broker.ack`."""


class Producers:
    """A process of simulated actors that lease, generate in no time, and put."""

    def __init__(self, tokens: int, names: Sequence[str]) -> None:
        self._template, self._names = template(tokens), names
        self._stop = asyncio.Event()

    async def drive(self, client: BrokerClient, at_once: int) -> None:
        """Lease and put until `stop`."""
        await asyncio.gather(*(self._act(client, name, at_once) for name in self._names))

    async def fill(self, queue: Queue, at_once: int) -> None:
        """Put into a queue without leases until `stop`."""

        async def make() -> None:
            while not self._stop.is_set():
                await queue.put_async(self._template)

        await asyncio.gather(*(make() for _ in range(at_once * len(self._names))))

    async def _act(self, client: BrokerClient, name: str, at_once: int) -> None:
        """Keep so many groups in the making; each is put at once."""
        await client.serving(name, 0)
        making: set[asyncio.Task[None]] = set()
        while not self._stop.is_set():
            if free := at_once - len(making):
                leases = await client.lease(name, free * GROUP_SIZE, POLL_SECONDS)
                making |= {asyncio.create_task(self._put(client, name, lease)) for lease in leases}
            if making:
                done, making = await asyncio.wait(making, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        await asyncio.gather(*making)

    async def _put(self, client: BrokerClient, name: str, lease: Lease) -> None:
        status = await client.put(name, payload_of(lease, self._template))
        assert status is PutStatus.ACCEPTED, status

    async def stop(self) -> None:
        """Let the actors end after their next put."""
        self._stop.set()


class Consumer:
    """A simulated learner and feeder of prompts: takes and acknowledges every batch at once."""

    def __init__(self) -> None:
        self._stop = asyncio.Event()
        self.groups = self.bytes = self.batches = 0

    async def run(self, broker: BrokerClient, broadcaster: BroadcasterClient | None = None) -> None:
        """Feed, take and acknowledge until `stop`; announces every version to a broadcaster."""
        feeding = asyncio.create_task(self._feed(broker))
        while not self._stop.is_set():
            batch = await broker.take(self.batches, POLL_SECONDS)
            if feeding.done():
                feeding.result()
            if batch is None:
                continue
            await broker.ack(self.batches, {})
            self.batches += 1
            if broadcaster is not None:
                await broadcaster.announce(manifest(self.batches))
            self.groups += len(batch.payloads)
            self.bytes += sum(map(len, batch.payloads))
        feeding.cancel()

    async def _feed(self, broker: BrokerClient) -> None:
        issued = 0
        while True:
            wanted = await broker.prompts_wanted(POLL_SECONDS)
            if wanted:
                numbers = range(issued + 1, issued + wanted + 1)
                prompts = [Prompt(prompt_id=prompt_id(number), text="1+1=") for number in numbers]
                issued += wanted
                await broker.issue(prompts, cursor=str(issued))

    async def drain(self, queue: Queue) -> None:
        """Take from a queue without batches, a batch of calls at once."""

        async def act() -> None:
            while not self._stop.is_set():
                try:
                    payload = await queue.get_async(timeout=POLL_SECONDS)
                except Empty:
                    continue
                self.groups += 1
                self.bytes += len(payload)

        await asyncio.gather(*(act() for _ in range(BATCH)))

    async def counts(self) -> tuple[float, int, int, int]:
        """Return the time, and groups, bytes and batches consumed so far."""
        return time.perf_counter(), self.groups, self.bytes, self.batches

    async def stop(self) -> None:
        """End after the next batch."""
        self._stop.set()


def start_process(kind: type, *arguments: Any) -> Any:
    """Start an object as an actor of Ray; return its handle."""
    return ray.remote(kind).options(num_cpus=0, max_concurrency=100).remote(*arguments)


def start_broker(directory: Path) -> tuple[Any, BrokerClient]:
    """Start the broker under test, with `synchronous = "full"`."""
    config = QueuesConfig(
        max_staleness=FOREVER,
        window=WINDOW,
        queued_batches=2 * WINDOW // BATCH,
        patience_seconds=0.0,  # no engine ever gets a newer version here
        synchronous="full",
    )
    actor = (
        ray.remote(CountedBroker)
        .options(num_cpus=0, max_concurrency=MAX_CONCURRENCY)
        .remote(
            directory,
            config=config,
            spec=RunSpec(groups_per_batch=BATCH, group_size=GROUP_SIZE, steps=FOREVER),
        )
    )
    ray.get(actor.opened.remote(), timeout=120)
    return actor, BrokerClient(actor)


def start_empty(tokens: int) -> BrokerClient:
    """Start the ceiling of messages."""
    options = {"num_cpus": 0, "max_concurrency": MAX_CONCURRENCY}
    return BrokerClient(ray.remote(EmptyBroker).options(**options).remote(tokens))


def write_and_sync(
    directory: Path, payload: bytes, groups_per_sync: float, seconds: float
) -> float:
    """Return the ceiling of the disk: groups/s of these bytes, synced after so many groups."""
    path, groups, due = directory / "ceiling", 0, groups_per_sync
    with path.open("wb", buffering=0) as file:
        began = time.perf_counter()
        while (elapsed := time.perf_counter() - began) < seconds:
            file.write(payload)
            groups += 1
            if groups >= due:
                os.fdatasync(file.fileno())
                due += groups_per_sync
    path.unlink()
    return groups / elapsed

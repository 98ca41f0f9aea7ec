"""What `headway bench queue` compares, and the processes that drive it.

All arms are driven by the same producers and the same consumer through the same `BrokerClient`:

    broker     the broker, durable
    empty      a Ray actor with the same methods and messages that keeps nothing: what Ray allows
    disk       no Ray: the same bytes, synced as often as the broker's journal was
    ray_queue  `ray.util.queue`, with neither leases nor durability
"""

import asyncio
import contextlib
import os
import time
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ray
from ray.util.queue import Queue

from queues.config import QueuesConfig, RunSpec
from queues.ray_broker import MAX_CONCURRENCY, BrokerActor, BrokerClient
from queues.records import (
    Batch,
    FinishReason,
    Lease,
    Prompt,
    Purpose,
    PutStatus,
    Rollout,
    RolloutGroup,
)
from queues.runtime.ray_payloads import to_arrays
from queues.schema import encode

GROUP_SIZE = 8
BATCH = 32
WINDOW = 2048
"""Groups that may be live: never what anybody waits for."""
POLL_SECONDS = 2.0
FOREVER = 10**6
"""Steps, and η: weights are no part of this."""


def groups_at_once(tokens: int) -> int:
    """Groups that an actor generates side by side: 256 rollouts, or 512,000 tokens."""
    return min(32, 64_000 // tokens)


def prompt_id(number: int) -> str:
    """All have one length, so that a payload can be made from another one."""
    return f"bench/0/{number:08d}"


def template(tokens: int) -> bytes:
    """The payload of group 0: GROUP_SIZE rollouts of so many tokens."""
    sampled = tokens - 3
    now = datetime.now(UTC)
    rollouts = [
        Rollout(
            sample_index=index,
            token_ids=list(range(tokens)),
            prompt_length=3,
            loss_mask=[False] * 3 + [True] * sampled,
            behavior_logprobs=[0.0] * 3 + [-0.5] * sampled,
            versions=[-1] * 3 + [0] * sampled,
            reward=float(index),
            reward_parts={"exact": float(index)},
            finish_reason=FinishReason.STOP,
            turns=1,
            environment="single_turn",
            engine_id="engine-0",
            created_at=now,
            finished_at=now,
        )
        for index in range(GROUP_SIZE)
    ]
    return encode(
        RolloutGroup(group_id="g00000000", prompt_id=prompt_id(0), attempt=1, rollouts=rollouts)
    )


def payload_of(lease: Lease, made_from: bytes) -> bytes:
    """The template as the result of a lease; encoding is the actors' work and not measured."""
    renamed = made_from.replace(b"g00000000", lease.group_id.encode())
    return renamed.replace(prompt_id(0).encode(), lease.prompt.prompt_id.encode())


class CountedBroker(BrokerActor):
    """The broker, and how often its journal was synced."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        journal = self.commits.journal
        self._syncs, commit = 0, journal.commit

        def counted() -> None:
            self._syncs += journal.has_changes
            commit()

        journal.commit = counted

    async def vitals(self) -> tuple[int, int]:
        """Syncs so far, and the process."""
        return self._syncs, os.getpid()


class EmptyBroker:
    """Answers what the broker would, without keeping, checking or deciding anything."""

    def __init__(self, tokens: int) -> None:
        self._payload = template(tokens)
        self._issued = self._leased = self._put = self._wanted = 0
        self._line_is_short, self._batch_is_ready = asyncio.Event(), asyncio.Event()
        self._line_is_short.set()

    async def prompts_wanted(self, timeout: float) -> int:
        """Half a line at a time, as the broker's feeder is asked."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._line_is_short.wait(), timeout)
            self._line_is_short.clear()
            return WINDOW
        return 0

    async def issue(self, prompts: Sequence[Prompt], *, cursor: str, last: bool = False) -> None:
        """See `Broker.issue`."""
        self._issued += len(prompts)

    async def serving(self, engine_id: str, version: int) -> None:
        """See `Broker.serving`."""

    async def lease(self, engine_id: str, room: int, timeout: float) -> list[Lease]:
        """See `Broker.lease`; never empty."""
        first = self._leased + 1
        self._leased += room // GROUP_SIZE
        if self._issued - self._leased < WINDOW:
            self._line_is_short.set()
        return [
            Lease(
                group_id=f"g{number:08d}",
                attempt=1,
                prompt=Prompt(prompt_id=prompt_id(number), text="1+1="),
                group_size=GROUP_SIZE,
                purpose=Purpose.TRAIN,
                temperature=None,
                start_version=0,
                deadline_version=FOREVER,
            )
            for number in range(first, self._leased + 1)
        ]

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


@ray.remote(num_cpus=0, max_concurrency=100)
class Producers:
    """A process of simulated actors: they lease, generate in no time, and put."""

    def __init__(self, tokens: int, names: Sequence[str]) -> None:
        self._template = template(tokens)
        self._names = names
        self._stop = asyncio.Event()
        self.served: Counter[str] = Counter()
        self.seconds: dict[str, list[float]] = {"lease": [], "put": []}

    async def drive(self, client: BrokerClient, at_once: int) -> None:
        """Lease and put until `stop`."""
        await asyncio.gather(*(self._act(client, name, at_once) for name in self._names))

    async def fill(self, queue: Queue, at_once: int) -> None:
        """Put into a queue that knows no leases."""

        async def make() -> None:
            while not self._stop.is_set():
                await queue.put_async(self._template)

        await asyncio.gather(*(make() for _ in range(at_once * len(self._names))))

    async def _act(self, client: BrokerClient, name: str, at_once: int) -> None:
        """Keep so many groups in the making, each put as soon as it is finished: at once."""
        await client.serving(name, 0)
        making: set[asyncio.Task[None]] = set()
        while not self._stop.is_set():
            if room := at_once - len(making):
                began = time.perf_counter()
                leases = await client.lease(name, room * GROUP_SIZE, POLL_SECONDS)
                self.seconds["lease"].append(time.perf_counter() - began)
                making |= {asyncio.create_task(self._put(client, name, x)) for x in leases}
            if making:
                done, making = await asyncio.wait(making, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        await asyncio.gather(*making)

    async def _put(self, client: BrokerClient, name: str, lease: Lease) -> None:
        payload = payload_of(lease, self._template)
        began = time.perf_counter()
        status = await client.put(name, payload)
        self.seconds["put"].append(time.perf_counter() - began)
        assert status is PutStatus.ACCEPTED, status
        self.served[name] += 1

    async def begin(self) -> None:
        """Forget what was measured so far."""
        self.served.clear()
        for seconds in self.seconds.values():
            seconds.clear()

    async def figures(self) -> tuple[dict[str, int], dict[str, list[float]]]:
        """Groups put by each actor, and how long each call took, since `begin`."""
        return {name: self.served[name] for name in self._names}, self.seconds

    async def stop(self) -> None:
        """Actors leave after their next put."""
        self._stop.set()


@ray.remote(num_cpus=0, max_concurrency=100)
class Consumer:
    """The learner and the feeder of prompts, in a process."""

    def __init__(self) -> None:
        self._stop = asyncio.Event()
        self.groups = self.bytes = 0

    async def drive(self, client: BrokerClient) -> None:
        """Feed, take and acknowledge until `stop`."""
        feeding = asyncio.create_task(self._feed(client))
        version = 0
        while not self._stop.is_set():
            batch = await client.take(version, POLL_SECONDS)
            if batch is None:
                continue
            await client.ack(version, {})
            version += 1
            self.groups += len(batch.payloads)
            self.bytes += sum(map(len, batch.payloads))
        feeding.cancel()

    async def _feed(self, client: BrokerClient) -> None:
        number = 0
        while True:
            wanted = await client.prompts_wanted(POLL_SECONDS)
            if wanted:
                ids = range(number + 1, number + wanted + 1)
                prompts = [Prompt(prompt_id=prompt_id(each), text="1+1=") for each in ids]
                number += wanted
                await client.issue(prompts, cursor=str(number))

    async def drain(self, queue: Queue) -> None:
        """Take from a queue that knows no batches, a batch of calls at once."""

        async def act() -> None:
            while not self._stop.is_set():
                try:
                    payload = await queue.get_async(timeout=POLL_SECONDS)
                except ray.util.queue.Empty:
                    continue
                self.groups += 1
                self.bytes += len(payload)

        await asyncio.gather(*(act() for _ in range(BATCH)))

    async def counts(self) -> tuple[float, int, int]:
        """Now, groups and bytes consumed so far."""
        return time.perf_counter(), self.groups, self.bytes

    async def stop(self) -> None:
        """Leave after the next batch."""
        self._stop.set()


def start_broker(directory: Path) -> tuple[Any, BrokerClient]:
    """The broker under test, as durable as it gets."""
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
    """The ceiling of messages."""
    options = {"num_cpus": 0, "max_concurrency": MAX_CONCURRENCY}
    return BrokerClient(ray.remote(EmptyBroker).options(**options).remote(tokens))


def write_and_sync(
    directory: Path, payload: bytes, groups_per_sync: float, seconds: float
) -> float:
    """The ceiling of the disk: groups/s of these bytes, synced after so many groups."""
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

"""The processes of `headway bench scale`: simulated actors and a simulated learner, real control.

A simulated actor calls what a real one does and as often: it long-polls for leases while it has
room, puts what it has "generated" (a sleep), renews its leases, waits for new weights, asks for a
permit to swap, reports, and tells the broker what it serves. Many share a process. No tensor moves.
"""

import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import ray

from benchmarks.queue_arms import GROUP_SIZE, payload_of, prompt_id, template
from queues.ray_broker import BrokerClient
from queues.records import Lease, Prompt, PutStatus
from queues.schema import decode, encode
from weight_sync.announcements import SwapReport
from weight_sync.manifest import Bucket, Manifest, TensorSpec
from weight_sync.ray_broadcaster import BroadcasterClient

POLL_SECONDS = 1.0
"""As in `actors.rollout_worker` and `weight_sync.receiver`."""
HEARTBEAT_SECONDS = 5.0
PAUSE_SECONDS = 0.03
"""Of a swap, beside its messages."""
FOREVER = 10**6
CALLS = ("lease", "put", "heartbeat", "serving", "announced", "permit")


def manifest(version: int) -> Manifest:
    """A version of one small tensor, made now."""
    return Manifest(
        version=version,
        tensors=(
            TensorSpec(name="w", dtype="float32", shape=(16,), bucket=0, offset=0, nbytes=64),
        ),
        buckets=(Bucket(nbytes=64, checksum="0" * 32, location="nowhere"),),
        created_at=time.time(),
    )


@lru_cache(maxsize=64)
def payload_at(tokens: int, version: int) -> bytes:
    """`queue_arms.template`, sampled at a version."""
    group = decode(template(tokens))
    rollouts = [
        replace(each, versions=[version if token else -1 for token in each.loss_mask])
        for each in group.rollouts
    ]
    return encode(replace(group, rollouts=rollouts))


@ray.remote(num_cpus=0, max_concurrency=100)
class Crowd:
    """A process of simulated actors.

    Args:
        tokens: Of a rollout.
        names: Of the engines.
        at_once: Groups that each generates side by side.
        seconds: That a group takes to be generated.
    """

    def __init__(self, tokens: int, names: Sequence[str], at_once: int, seconds: float) -> None:
        self._tokens, self._names, self._generation = tokens, names, seconds
        self._at_once = at_once
        self._stop = asyncio.Event()
        self._held: dict[str, dict[asyncio.Task[None], Lease]] = {name: {} for name in names}
        self._serves = dict.fromkeys(names, 0)
        self._chance = random.Random(len(names))
        self.seconds: dict[str, list[float]] = {call: [] for call in CALLS}
        self.refused = 0

    async def run(self, broker: BrokerClient, broadcaster: BroadcasterClient) -> None:
        """Everything, until `stop`."""
        await asyncio.gather(
            *(self._act(broker, name) for name in self._names),
            *(self._renew(broker, name) for name in self._names),
            *(self._follow(broker, broadcaster, name) for name in self._names),
        )

    async def begin(self) -> None:
        """Forget what was measured so far."""
        for seconds in self.seconds.values():
            seconds.clear()

    async def figures(self) -> tuple[dict[str, list[float]], int]:
        """Seconds of every call since `begin`, and results that were not accepted so far."""
        return self.seconds, self.refused

    async def stop(self) -> None:
        """Everybody leaves after what they wait for."""
        self._stop.set()

    async def _act(self, broker: BrokerClient, name: str) -> None:
        await self._timed("serving", broker.serving(name, 0))
        held = self._held[name]
        while not self._stop.is_set():
            if room := self._at_once - len(held):
                waits = broker.lease(name, room * GROUP_SIZE, POLL_SECONDS)
                for lease in await self._timed("lease", waits):
                    held[asyncio.create_task(self._generate(broker, name, lease))] = lease
            if held:
                wait = 0.0 if len(held) < self._at_once else None
                done, _ = await asyncio.wait(
                    held, timeout=wait, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    task.result()
                    del held[task]

    async def _generate(self, broker: BrokerClient, name: str, lease: Lease) -> None:
        await asyncio.sleep(self._generation * self._chance.uniform(0.5, 1.5))
        payload = payload_of(lease, payload_at(self._tokens, lease.start_version))
        status = await self._timed("put", broker.put(name, payload))
        self.refused += status is not PutStatus.ACCEPTED

    async def _renew(self, broker: BrokerClient, name: str) -> None:
        await self._sleep(self._chance.uniform(0, HEARTBEAT_SECONDS))
        while not self._stop.is_set():
            if leases := self._held[name].values():
                held = [(lease.group_id, lease.attempt) for lease in leases]
                await self._timed("heartbeat", broker.heartbeat(name, held))
            await self._sleep(HEARTBEAT_SECONDS)

    async def _follow(
        self, broker: BrokerClient, broadcaster: BroadcasterClient, name: str
    ) -> None:
        while not self._stop.is_set():
            found = await broadcaster.newest(self._serves[name], POLL_SECONDS)
            if found is None:
                continue
            self.seconds["announced"].append(time.time() - found.created_at)
            if not await self._timed("permit", broadcaster.acquire_swap(name, POLL_SECONDS)):
                continue
            began = time.time()
            await asyncio.sleep(PAUSE_SECONDS)
            self._serves[name] = found.version
            await broadcaster.report(
                SwapReport(
                    engine_id=name, version=found.version, published_at=found.created_at,
                    staged_at=began, pause_seconds=PAUSE_SECONDS, load_seconds=0.0,
                    resume_seconds=0.0, swap_started_at=began, swap_finished_at=time.time(),
                    bytes=64,
                )
            )  # fmt: skip
            await self._timed("serving", broker.serving(name, found.version))

    async def _timed(self, call: str, answer: Any) -> Any:
        began = time.perf_counter()
        found = await answer
        self.seconds[call].append(time.perf_counter() - began)
        return found

    async def _sleep(self, seconds: float) -> None:
        """Until then, or `stop`."""
        if seconds > 0:
            await asyncio.wait([self._stopping()], timeout=seconds)

    def _stopping(self) -> "asyncio.Task[bool]":
        return asyncio.create_task(self._stop.wait())


@ray.remote(num_cpus=0, max_concurrency=100)
class Learner:
    """Takes every batch at once, acknowledges it and announces a version; feeds prompts."""

    def __init__(self) -> None:
        self._stop = asyncio.Event()
        self.groups = self.batches = 0

    async def run(self, broker: BrokerClient, broadcaster: BroadcasterClient) -> None:
        """Until `stop`."""
        feeding = asyncio.create_task(self._feed(broker))
        version = 0
        while not self._stop.is_set():
            batch = await broker.take(version, POLL_SECONDS)
            if feeding.done():
                feeding.result()
            if batch is None:
                continue
            version += 1
            await broker.ack(version - 1, {})
            await broadcaster.announce(manifest(version))
            self.groups += len(batch.payloads)
            self.batches += 1
        feeding.cancel()

    async def _feed(self, broker: BrokerClient) -> None:
        numbers = itertools.count(1)
        while True:
            wanted = await broker.prompts_wanted(POLL_SECONDS)
            new = itertools.islice(numbers, wanted)
            prompts = [Prompt(prompt_id=prompt_id(number), text="1+1=") for number in new]
            if prompts:
                await broker.issue(prompts, cursor=prompts[-1].prompt_id)

    async def counts(self) -> tuple[float, int, int]:
        """Now, groups and batches so far."""
        return time.perf_counter(), self.groups, self.batches

    async def stop(self) -> None:
        """Leave after the next batch."""
        self._stop.set()

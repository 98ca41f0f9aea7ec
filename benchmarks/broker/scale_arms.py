"""The processes of `headway bench scale`: simulated actors and a simulated learner, real control.

A simulated actor has a client of its own and calls what a real one does and as often: it long-polls
for leases while it has room, puts what it has "generated" (a sleep), renews its leases, saves the
rollouts that have finished before the others of their group, waits for new weights, asks for a
permit to swap, reports, and tells the broker what it serves. Many share a process. No tensor moves.

Before it polls, it asks once for what can be leased at once: only that answer tells how fast the
broker is. A poll also waits until admission allows a lease, the weights of a new version included.
"""

import asyncio
import contextlib
import itertools
import random
import time
from collections import deque
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeVar

import ray

from benchmarks.broker.queue_arms import GROUP_SIZE, payload_of, prompt_id, template
from queues.ray_broker import BrokerClient
from queues.records import Lease, Prompt, PutStatus
from queues.schema import decode, encode
from weight_sync.announcements import WeightUpdateReport
from weight_sync.manifest import Bucket, Manifest, TensorSpec
from weight_sync.ray_broadcaster import BroadcasterClient
from weight_sync.receive.receiver import NEWEST_SECONDS, newer

T = TypeVar("T")
POLL_SECONDS = 1.0
"""As in `actors.rollout.rollout_worker`, and of permits in `weight_sync.receive.receiver`."""
HEARTBEAT_SECONDS = 5.0
PAUSE_SECONDS = 0.03
"""Of a swap, beside its messages."""
FOREVER = 10**6
CALLS = ("put", "lease", "lease_poll", "heartbeat", "save", "serving", "announced", "permit")
"""What is timed: "lease" is answered at once, with or without leases, "lease_poll" when admission
allows some; "announced" is from a version's announcement to its receiver."""


def manifest(version: int) -> Manifest:
    """A version of one small tensor, made now."""
    return Manifest(
        version=version,
        tensors=(TensorSpec(name="w", dtype="float32", shape=(16,), bucket=0, offset=0),),
        buckets=(Bucket(nbytes=64, checksum="0" * 32, location="nowhere"),),
        created_at=time.time(),
    )


@lru_cache(maxsize=256)
def payload_at(tokens: int, version: int, rollouts: int = GROUP_SIZE) -> bytes:
    """The first rollouts of `queue_arms.template`, sampled at a version."""
    group = decode(template(tokens))
    sampled = [
        replace(each, versions=[version if token else -1 for token in each.loss_mask])
        for each in group.rollouts[:rollouts]
    ]
    return encode(replace(group, rollouts=sampled))


@dataclass(slots=True)
class Generating:
    """A group whose rollouts end one after the other, in equal intervals."""

    lease: Lease
    began: float
    """Seconds of `time.perf_counter`."""
    seconds: float
    saved: int = 0
    """Rollouts that the broker has."""

    def due(self, now: float) -> int:
        """Rollouts to save: all that have ended, if they are twice those saved (`PartialGroup`)."""
        passed = (now - self.began) / self.seconds if self.seconds else 1.0
        ended = min(GROUP_SIZE, int(GROUP_SIZE * passed))
        return ended if ended >= max(1, 2 * self.saved) else 0


@dataclass(slots=True)
class ActorStatistics:
    """What the actors of a process have seen."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {call: [] for call in CALLS})
    """Of every call since the measurement began; of puts only those that were accepted."""

    async def timed(self, call: str, answer: Awaitable[T]) -> T:
        """What a call answers."""
        began = time.perf_counter()
        found = await answer
        if call != "put" or found is PutStatus.ACCEPTED:
            self.seconds[call].append(time.perf_counter() - began)
        return found


class SimulatedActor:
    """One engine.

    Args:
        name: Of the engine.
        broker: A client that nobody else uses: a real actor's puts wait for those before them.
        broadcaster: May be shared.
        tokens: Of a rollout.
        at_once: Groups that it generates side by side.
        seconds: Between the ends of two groups in one place, in the mean. What the place waited for
            lease and put is taken off the generation, so that the rate is the one asked for.
        tally: Where calls are timed.
        stop: Set when it is to leave.
    """

    def __init__(
        self,
        name: str,
        broker: BrokerClient,
        broadcaster: BroadcasterClient,
        *,
        tokens: int,
        at_once: int,
        seconds: float,
        tally: ActorStatistics,
        stop: asyncio.Event,
    ) -> None:
        self._name, self._broker, self._broadcaster = name, broker, broadcaster
        self._tokens, self._at_once, self._seconds = tokens, at_once, seconds
        self._tally, self._stop = tally, stop
        self._chance = random.Random(name)
        self._held: dict[asyncio.Task[None], Generating] = {}
        begin = time.perf_counter()
        self._places = deque(
            begin - self._seconds * self._chance.uniform(0.0, 0.5) for _ in range(at_once)
        )
        """Of each place that is free: when the generation of its next group would have begun."""
        self._serves = 0

    async def run(self) -> None:
        """Everything, until it is to leave."""
        await asyncio.gather(self._act(), self._renew(), self._follow())

    async def _act(self) -> None:
        await self._tally.timed("serving", self._broker.serving(self._name, 0))
        refused = False
        while not self._stop.is_set():
            if room := self._at_once - len(self._held):
                call, timeout = ("lease_poll", POLL_SECONDS) if refused else ("lease", 0.0)
                answer = self._broker.lease(self._name, room * GROUP_SIZE, timeout)
                leases = await self._tally.timed(call, answer)
                refused = not leases
                for lease in leases:
                    self._begin(lease)
            if self._held:
                wait = 0.0 if len(self._held) < self._at_once else None
                done, _ = await asyncio.wait(
                    self._held, timeout=wait, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    task.result()
                    del self._held[task]

    def _begin(self, lease: Lease) -> None:
        now = time.perf_counter()
        end = max(now, self._places.popleft() + self._seconds * self._chance.uniform(0.5, 1.5))
        group = Generating(lease, now, end - now)
        self._held[asyncio.create_task(self._generate(group, end))] = group

    async def _generate(self, group: Generating, end: float) -> None:
        await asyncio.sleep(group.seconds)
        payload = self._payload(group.lease, GROUP_SIZE)
        await self._tally.timed("put", self._broker.put(self._name, payload))
        self._places.append(end)

    def _payload(self, lease: Lease, rollouts: int) -> bytes:
        return payload_of(lease, payload_at(self._tokens, lease.start_version, rollouts))

    async def _renew(self) -> None:
        await self._sleep(self._chance.uniform(0, HEARTBEAT_SECONDS))
        while not self._stop.is_set():
            if groups := [*self._held.values()]:
                held = [(group.lease.group_id, group.lease.attempt) for group in groups]
                await self._tally.timed("heartbeat", self._broker.heartbeat(self._name, held))
            for group in groups:
                if rollouts := group.due(time.perf_counter()):
                    group.saved = rollouts
                    payload = self._payload(group.lease, rollouts)
                    await self._tally.timed("save", self._broker.save(self._name, payload))
            await self._sleep(HEARTBEAT_SECONDS)

    async def _follow(self) -> None:
        while not self._stop.is_set():
            found = await newer(self._broadcaster, self._serves, NEWEST_SECONDS, self._stop)
            if found is None:
                continue
            self._tally.seconds["announced"].append(time.time() - found.created_at)
            permit = self._broadcaster.acquire_swap(self._name, POLL_SECONDS)
            if not await self._tally.timed("permit", permit):
                continue
            began = time.time()
            await asyncio.sleep(PAUSE_SECONDS)
            self._serves = found.version
            await self._broadcaster.report(
                WeightUpdateReport(
                    engine_id=self._name, version=found.version, published_at=found.created_at,
                    staged_at=began, pause_seconds=PAUSE_SECONDS, load_seconds=0.0,
                    resume_seconds=0.0, swap_started_at=began, swap_finished_at=time.time(),
                    bytes=64,
                )
            )  # fmt: skip
            await self._tally.timed("serving", self._broker.serving(self._name, found.version))

    async def _sleep(self, seconds: float) -> None:
        """Until then, or until it is to leave."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop.wait()


@ray.remote(num_cpus=0, max_concurrency=100)
class Crowd:
    """A process of simulated actors; arguments as theirs.

    Args:
        names: Of the engines.
        **each: Tokens, groups at once and seconds of every actor.
    """

    def __init__(self, names: Sequence[str], **each: Any) -> None:
        self._names, self._each = names, each
        self._stop, self._tally = asyncio.Event(), ActorStatistics()

    async def run(self, broker: BrokerClient, broadcaster: BroadcasterClient) -> None:
        """Everything, until `stop`."""
        common = {**self._each, "tally": self._tally, "stop": self._stop}
        actors = [
            SimulatedActor(name, BrokerClient(broker.handle), broadcaster, **common)
            for name in self._names
        ]
        await asyncio.gather(*(actor.run() for actor in actors))

    async def begin(self) -> None:
        """Forget what was measured so far."""
        for seconds in self._tally.seconds.values():
            seconds.clear()

    async def puts(self) -> int:
        """How many were accepted since `begin`."""
        return len(self._tally.seconds["put"])

    async def seconds(self) -> dict[str, list[float]]:
        """Of every call since `begin`."""
        return self._tally.seconds

    async def stop(self) -> None:
        """Everybody leaves after what they wait for."""
        self._stop.set()


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

"""Simulated actors and a simulated learner for the benchmarks of the broker.

An actor makes the calls of a real one, as often; generating is a sleep, and no tensor moves. Before
it polls for leases it asks once for what can be leased at once: only that shows the broker's speed.
"""

import asyncio
import contextlib
import random
import time
from collections import deque
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

from benchmarks.harness.synthetic_load import make_rollout
from headway import clock
from queues.ray_broker import BrokerClient
from queues.records import Lease, Prompt, Purpose, PutStatus, RolloutGroup
from queues.schema import encode
from weight_sync.announcements import WeightUpdateReport
from weight_sync.manifest import Bucket, Manifest, TensorSpec
from weight_sync.ray_broadcaster import BroadcasterClient
from weight_sync.receive.receiver import NEWEST_SECONDS, newer

T = TypeVar("T")
GROUP_SIZE = 8
POLL_SECONDS = 2.0
FOREVER = 10**6
PAUSE_SECONDS = 0.03
"""Duration of a swap, beside its messages."""
CALLS = ("put", "lease", "lease_poll", "heartbeat", "save", "serving", "announced", "permit")
"""Calls that are timed: "lease" is answered at once, with or without leases,
"lease_poll" when admission allows some; "announced" is from announcement to receiver."""
PROMPT_TOKENS = 3


def prompt_id(number: int) -> str:
    """Return an id; all have one length, so that one payload can be made from another."""
    return f"bench/0/{number:08d}"


def make_lease(number: int) -> Lease:
    """Return a lease of a group, named by its number, that any version may train."""
    return Lease(
        group_id=f"g{number:08d}",
        attempt=1,
        prompt=Prompt(prompt_id=prompt_id(number), text="1+1=", answer="2"),
        group_size=GROUP_SIZE,
        purpose=Purpose.TRAIN,
        temperature=None,
        start_version=0,
        deadline_version=FOREVER,
    )


@lru_cache(maxsize=256)
def template(tokens: int, version: int = 0, rollouts: int = GROUP_SIZE) -> bytes:
    """Return the payload of group 0: rollouts of so many tokens, sampled by a version."""
    made = [
        make_rollout(list(range(tokens)), index, prompt_length=PROMPT_TOKENS)
        for index in range(rollouts)
    ]
    versions = [-1] * PROMPT_TOKENS + [version] * (tokens - PROMPT_TOKENS)
    sampled = [replace(rollout, versions=versions) for rollout in made]
    return encode(
        RolloutGroup(group_id="g00000000", prompt_id=prompt_id(0), attempt=1, rollouts=sampled)
    )


def payload_of(lease: Lease, tokens: int, rollouts: int = GROUP_SIZE) -> bytes:
    """Return a template as the result of a lease; the work of encoding is not measured."""
    payload = template(tokens, lease.start_version, rollouts)
    payload = payload.replace(b"g00000000", lease.group_id.encode())
    return payload.replace(prompt_id(0).encode(), lease.prompt.prompt_id.encode())


def manifest(version: int) -> Manifest:
    """Return a version of one small tensor, made now."""
    tensors = (TensorSpec(name="w", dtype="float32", shape=(16,), bucket=0, offset=0),)
    buckets = (Bucket(nbytes=64, checksum="0" * 32, location="nowhere"),)
    return Manifest(version=version, tensors=tensors, buckets=buckets, created_at=clock.now())


@dataclass(slots=True)
class Generating:
    """A group whose rollouts end one after the other at equal intervals."""

    lease: Lease
    began: float
    """Value of `time.perf_counter`."""
    seconds: float
    saved: int = 0
    """Number of rollouts saved at the broker."""

    def due(self, now: float) -> int:
        """Return the rollouts to save: all that have ended, if at least twice those saved."""
        passed = (now - self.began) / self.seconds if self.seconds else 1.0
        ended = min(GROUP_SIZE, int(GROUP_SIZE * passed))
        return ended if ended >= max(1, 2 * self.saved) else 0


@dataclass(frozen=True, slots=True)
class Pace:
    """The load that a simulated actor makes."""

    tokens: int
    """Tokens of a rollout."""
    at_once: int
    """Groups generated at once."""
    seconds: float
    """Mean time between the ends of two groups in one slot. The wait for lease and put is taken off
    the generation, so that the rate is the one asked for."""
    poll_seconds: float = 1.0
    """As in `actors.rollout.rollout_worker`, and for permits in `weight_sync.receive.receiver`."""
    heartbeat_seconds: float = 5.0


class SimulatedActor:
    """A simulated rollout actor of a crowd, which times its calls."""

    def __init__(
        self, name: str, broker: BrokerClient, broadcaster: BroadcasterClient, crowd: "Crowd"
    ) -> None:
        self._name, self._broker, self._broadcaster = name, broker, broadcaster
        self._pace, self._timed, self._stop = crowd.pace, crowd.timed, crowd.stopped
        self._announced = crowd.measured["announced"]
        self._chance = random.Random(name)
        self._held: dict[asyncio.Task[None], Generating] = {}
        begin, seconds = time.perf_counter(), self._pace.seconds
        self._slots = deque(
            begin - seconds * self._chance.uniform(0.0, 0.5) for _ in range(self._pace.at_once)
        )
        """Time at which each free slot would have begun its next group."""
        self._serves = 0

    async def run(self) -> None:
        """Lease, generate, renew and update until `stop` is set."""
        await asyncio.gather(self._act(), self._renew(), self._follow())

    async def _act(self) -> None:
        await self._timed("serving", self._broker.serving(self._name, 0))
        refused = False
        while not self._stop.is_set():
            free = self._pace.at_once - len(self._held)
            if free:
                call, timeout = (
                    ("lease_poll", self._pace.poll_seconds) if refused else ("lease", 0.0)
                )
                answer = self._broker.lease(self._name, free * GROUP_SIZE, timeout)
                leases = await self._timed(call, answer)
                refused = not leases
                for lease in leases:
                    self._begin(lease)
            if self._held:
                wait = 0.0 if len(self._held) < self._pace.at_once else None
                done, _ = await asyncio.wait(
                    self._held, timeout=wait, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    task.result()
                    del self._held[task]

    def _begin(self, lease: Lease) -> None:
        now = time.perf_counter()
        end = max(now, self._slots.popleft() + self._pace.seconds * self._chance.uniform(0.5, 1.5))
        group = Generating(lease, now, end - now)
        self._held[asyncio.create_task(self._generate(group, end))] = group

    async def _generate(self, group: Generating, end: float) -> None:
        await asyncio.sleep(group.seconds)
        payload = payload_of(group.lease, self._pace.tokens)
        await self._timed("put", self._broker.put(self._name, payload))
        self._slots.append(end)

    async def _renew(self) -> None:
        await self._sleep(self._chance.uniform(0, self._pace.heartbeat_seconds))
        while not self._stop.is_set():
            if groups := [*self._held.values()]:
                held = [(group.lease.group_id, group.lease.attempt) for group in groups]
                await self._timed("heartbeat", self._broker.heartbeat(self._name, held))
            for group in groups:
                if rollouts := group.due(time.perf_counter()):
                    group.saved = rollouts
                    payload = payload_of(group.lease, self._pace.tokens, rollouts)
                    await self._timed("save", self._broker.save(self._name, payload))
            await self._sleep(self._pace.heartbeat_seconds)

    async def _follow(self) -> None:
        broadcaster = self._broadcaster
        while not self._stop.is_set():
            new = await newer(broadcaster, (self._serves, None), NEWEST_SECONDS, self._stop)
            if new is None:
                continue
            self._announced.append(clock.now() - new.created_at)
            permit = broadcaster.acquire_swap(self._name, self._pace.poll_seconds)
            if not await self._timed("permit", permit):
                continue
            began = clock.now()
            await asyncio.sleep(PAUSE_SECONDS)
            self._serves = new.version
            await broadcaster.report(
                WeightUpdateReport(
                    engine_id=self._name, version=new.version, published_at=new.created_at,
                    staged_at=began, pause_seconds=PAUSE_SECONDS, load_seconds=0.0,
                    resume_seconds=0.0, swap_started_at=began, swap_finished_at=clock.now(),
                    bytes=64,
                )
            )  # fmt: skip
            await self._timed("serving", self._broker.serving(self._name, new.version))

    async def _sleep(self, seconds: float) -> None:
        """Sleep until then, or until `stop` is set."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop.wait()


class Crowd:
    """A process of simulated actors, each of which makes the load of a pace."""

    def __init__(self, names: Sequence[str], pace: Pace) -> None:
        self._names, self.pace = names, pace
        self.stopped = asyncio.Event()
        self.measured: dict[str, list[float]] = {call: [] for call in CALLS}

    async def run(self, broker: BrokerClient, broadcaster: BroadcasterClient) -> None:
        """Run the actors until `stop`, each with a client of its own, as a real one has."""
        actors = (
            SimulatedActor(name, type(broker)(broker.handle), broadcaster, self)
            for name in self._names
        )
        await asyncio.gather(*(actor.run() for actor in actors))

    async def timed(self, call: str, answer: Awaitable[T]) -> T:
        """Await a call and note its seconds; those of a put only if it was accepted."""
        began = time.perf_counter()
        result = await answer
        if call != "put" or result is PutStatus.ACCEPTED:
            self.measured[call].append(time.perf_counter() - began)
        return result

    async def begin(self) -> None:
        """Forget what was measured so far."""
        for seconds in self.measured.values():
            seconds.clear()

    async def seconds(self) -> dict[str, list[float]]:
        """Return the seconds of every call since `begin`."""
        return self.measured

    async def stop(self) -> None:
        """Let the actors end after their current calls."""
        self.stopped.set()


class Consumer:
    """A simulated learner and feeder of prompts: takes and acknowledges every batch at once."""

    def __init__(self) -> None:
        self._stop = asyncio.Event()
        self.groups = self.batches = 0

    async def run(self, broker: BrokerClient, broadcaster: BroadcasterClient) -> None:
        """Feed, take, acknowledge and announce versions until `stop`."""
        feeding = asyncio.create_task(self._feed(broker))
        while not self._stop.is_set():
            batch = await broker.take(self.batches, POLL_SECONDS)
            if feeding.done():
                feeding.result()
            if batch is None:
                continue
            await broker.ack(self.batches, {})
            self.batches += 1
            await broadcaster.announce(manifest(self.batches))
            self.groups += len(batch.payloads)
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

    async def counts(self) -> tuple[float, int, int]:
        """Return the time, and groups and batches consumed so far."""
        return time.perf_counter(), self.groups, self.batches

    async def stop(self) -> None:
        """End after the next batch."""
        self._stop.set()

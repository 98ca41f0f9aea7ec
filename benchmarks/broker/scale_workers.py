"""The simulated actors of `headway bench scale`.

Each has a client of its own and makes the calls of a real actor, as often; generating is a sleep,
and no tensor moves. Before it polls for leases, it asks once for what can be leased at once: only
that answer shows how fast the broker is, since a poll waits for admission too.
"""

import asyncio
import contextlib
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeVar

from benchmarks.broker.queue_workers import GROUP_SIZE, payload_of, template
from headway import clock
from queues.ray_broker import BrokerClient
from queues.records import Lease, PutStatus
from queues.schema import decode, encode
from weight_sync.announcements import WeightUpdateReport
from weight_sync.ray_broadcaster import BroadcasterClient
from weight_sync.receive.receiver import NEWEST_SECONDS, newer

T = TypeVar("T")
PAUSE_SECONDS = 0.03
"""Duration of a swap, beside its messages."""
CALLS = ("put", "lease", "lease_poll", "heartbeat", "save", "serving", "announced", "permit")
"""Calls that are timed: "lease" is answered at once, with or without leases,
"lease_poll" when admission allows some; "announced" is from announcement to receiver."""


@lru_cache(maxsize=256)
def payload_at(tokens: int, version: int, rollouts: int = GROUP_SIZE) -> bytes:
    """Return the first rollouts of `queue_workers.template`, sampled at a version."""
    group = decode(template(tokens))
    sampled = [
        replace(rollout, versions=[version if token else -1 for token in rollout.loss_mask])
        for rollout in group.rollouts[:rollouts]
    ]
    return encode(replace(group, rollouts=sampled))


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


@dataclass(slots=True)
class ActorStatistics:
    """Seconds of the calls of the actors of a process."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {call: [] for call in CALLS})
    """By call, since the measurement began; of puts only those that were accepted."""

    async def timed(self, call: str, answer: Awaitable[T]) -> T:
        """Await a call and note its seconds."""
        began = time.perf_counter()
        result = await answer
        if call != "put" or result is PutStatus.ACCEPTED:
            self.seconds[call].append(time.perf_counter() - began)
        return result


@dataclass(frozen=True, slots=True)
class Pace:
    """The load that a simulated actor makes."""

    tokens: int
    """Tokens of a rollout."""
    at_once: int
    """Groups that it generates at once."""
    seconds: float
    """Mean time between the ends of two groups in one slot. The wait for lease and put is taken off
    the generation, so that the rate is the one asked for."""
    poll_seconds: float = 1.0
    """As in `actors.rollout.rollout_worker`, and for permits in `weight_sync.receive.receiver`."""
    heartbeat_seconds: float = 5.0


class SimulatedActor:
    """A simulated rollout actor with a broker client of its own, whose puts wait for each other."""

    def __init__(
        self,
        name: str,
        broker: BrokerClient,
        broadcaster: BroadcasterClient,
        pace: Pace,
        statistics: ActorStatistics,
        stop: asyncio.Event,
    ) -> None:
        self._name, self._broker, self._broadcaster = name, broker, broadcaster
        self._pace, self._statistics, self._stop = pace, statistics, stop
        self._chance = random.Random(name)
        self._held: dict[asyncio.Task[None], Generating] = {}
        begin = time.perf_counter()
        self._slots = deque(
            begin - self._pace.seconds * self._chance.uniform(0.0, 0.5) for _ in range(pace.at_once)
        )
        """Time at which each free slot would have begun its next group."""
        self._serves = 0

    async def run(self) -> None:
        """Lease, generate, renew and update until `stop` is set."""
        await asyncio.gather(self._act(), self._renew(), self._follow())

    async def _act(self) -> None:
        await self._statistics.timed("serving", self._broker.serving(self._name, 0))
        refused = False
        while not self._stop.is_set():
            free = self._pace.at_once - len(self._held)
            if free:
                call, timeout = (
                    ("lease_poll", self._pace.poll_seconds) if refused else ("lease", 0.0)
                )
                answer = self._broker.lease(self._name, free * GROUP_SIZE, timeout)
                leases = await self._statistics.timed(call, answer)
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
        payload = self._payload(group.lease, GROUP_SIZE)
        await self._statistics.timed("put", self._broker.put(self._name, payload))
        self._slots.append(end)

    def _payload(self, lease: Lease, rollouts: int) -> bytes:
        return payload_of(lease, payload_at(self._pace.tokens, lease.start_version, rollouts))

    async def _renew(self) -> None:
        await self._sleep(self._chance.uniform(0, self._pace.heartbeat_seconds))
        while not self._stop.is_set():
            if groups := [*self._held.values()]:
                held = [(group.lease.group_id, group.lease.attempt) for group in groups]
                await self._statistics.timed("heartbeat", self._broker.heartbeat(self._name, held))
            for group in groups:
                if rollouts := group.due(time.perf_counter()):
                    group.saved = rollouts
                    payload = self._payload(group.lease, rollouts)
                    await self._statistics.timed("save", self._broker.save(self._name, payload))
            await self._sleep(self._pace.heartbeat_seconds)

    async def _follow(self) -> None:
        while not self._stop.is_set():
            new = await newer(self._broadcaster, (self._serves, None), NEWEST_SECONDS, self._stop)
            if new is None:
                continue
            self._statistics.seconds["announced"].append(clock.now() - new.created_at)
            permit = self._broadcaster.acquire_swap(self._name, self._pace.poll_seconds)
            if not await self._statistics.timed("permit", permit):
                continue
            began = clock.now()
            await asyncio.sleep(PAUSE_SECONDS)
            self._serves = new.version
            await self._broadcaster.report(
                WeightUpdateReport(
                    engine_id=self._name, version=new.version, published_at=new.created_at,
                    staged_at=began, pause_seconds=PAUSE_SECONDS, load_seconds=0.0,
                    resume_seconds=0.0, swap_started_at=began, swap_finished_at=clock.now(),
                    bytes=64,
                )
            )  # fmt: skip
            await self._statistics.timed("serving", self._broker.serving(self._name, new.version))

    async def _sleep(self, seconds: float) -> None:
        """Sleep until then, or until `stop` is set."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop.wait()


class Crowd:
    """A process of simulated actors."""

    def __init__(
        self,
        names: Sequence[str],
        pace: Pace,
        client: Callable[[Any], BrokerClient] = BrokerClient,
    ) -> None:
        self._names, self._pace, self._client = names, pace, client
        self._stop, self._statistics = asyncio.Event(), ActorStatistics()

    async def run(self, broker: BrokerClient, broadcaster: BroadcasterClient) -> None:
        """Run the actors until `stop`."""
        actors = [
            SimulatedActor(
                name,
                self._client(broker.handle),
                broadcaster,
                self._pace,
                self._statistics,
                self._stop,
            )
            for name in self._names
        ]
        await asyncio.gather(*(actor.run() for actor in actors))

    async def begin(self) -> None:
        """Forget what was measured so far."""
        for seconds in self._statistics.seconds.values():
            seconds.clear()

    async def puts(self) -> int:
        """Return the number of accepted puts since `begin`."""
        return len(self._statistics.seconds["put"])

    async def seconds(self) -> dict[str, list[float]]:
        """Return the seconds of every call since `begin`."""
        return self._statistics.seconds

    async def stop(self) -> None:
        """Let the actors end after their current calls."""
        self._stop.set()

"""Rates, latencies and CPU seconds of broker and broadcaster with simulated actors."""

import contextlib
import os
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.util.queue import Queue

from benchmarks.broker.ceilings import CountedBroker, EmptyBroker, write_and_sync
from benchmarks.broker.load import (
    BATCH,
    FOREVER,
    GROUP_SIZE,
    WINDOW,
    Consumer,
    Crowd,
    Pace,
    template,
)
from benchmarks.harness.record import Record
from headway.metrics import MetricsAccess
from headway.ray_service import MAX_CONCURRENCY
from queues.config import QueuesConfig, RunSpec
from queues.ray_broker import BrokerClient, create_broker
from weight_sync.ray_broadcaster import create_broadcaster

CALL_SECONDS = 120.0
END_SECONDS = 10.0
GROUPS = 256
"""Groups that all actors of a paced measurement generate at once, at least one each."""
TIMED = 8
"""Actors that are timed, at least; an eighth of all where that is more."""
ENOUGH = 1000
"""Puts that are timed, unless that takes longer than PATIENCE measurements."""
PATIENCE = 10
SCRAPE_EVERY = 2.0
TOKENS = 100
"""Tokens of a rollout of paced actors."""
FAST_PROCESSES, PACED_PROCESSES = 2, 8
"""Processes that simulate the actors; paced ones have a further one of actors that are timed."""
WARM_UP_SECONDS, SECONDS = 2.0, 4.0
"""Duration of each measurement without a pace, and of what comes before it."""
PACED_WARM_UP_SECONDS, PACED_SECONDS = 6.0, 12.0
UPDATE_FRACTION = 0.25
SERVICES = ("broker", "broadcaster")


def start_process(kind: type, *arguments: Any, at_once: int = 100, **options: Any) -> Any:
    """Start an object as an actor of Ray that serves so many calls at once; return its handle."""
    settings = {"num_cpus": 0, "max_concurrency": at_once}
    return ray.remote(kind).options(**settings).remote(*arguments, **options)


def call(method: Any, *arguments: Any) -> Any:
    """Return the answer of an actor's method."""
    return ray.get(method.remote(*arguments), timeout=CALL_SECONDS)


def process_of(handle: Any) -> psutil.Process:
    """Return the process of an actor."""
    return psutil.Process(call(handle.__ray_call__, lambda _: os.getpid()))


@contextlib.contextmanager
def running(actors: Sequence[Any], start: Callable[[Any], Any]) -> Iterator[None]:
    """Start a call of each actor, all of which end with the block.

    Raises:
        RayTaskError: An actor raised.
    """
    work = [start(actor) for actor in actors]
    try:
        yield
        ended, _ = ray.wait(work, num_returns=1, timeout=0)
        ray.get(ended)
        ray.get([actor.stop.remote() for actor in actors], timeout=CALL_SECONDS)
        ended, _ = ray.wait(work, num_returns=len(work), timeout=END_SECONDS)
        ray.get(ended)
    finally:
        for actor in actors:
            ray.kill(actor)


@contextlib.contextmanager
def fast_actors(
    tokens: int, actors: int, target: BrokerClient | Queue, at_once: int
) -> Iterator[Any]:
    """Run actors that generate in no time and a consumer, which it yields."""
    names = [f"engine-{index}" for index in range(actors)]
    pace = Pace(tokens=tokens, at_once=at_once, seconds=0.0, poll_seconds=WARM_UP_SECONDS)
    crowds = [
        start_process(Crowd, names[first::FAST_PROCESSES], pace, shared=True)
        for first in range(min(actors, FAST_PROCESSES))
    ]
    consumer = start_process(Consumer)

    def start(actor: Any) -> Any:
        if not isinstance(target, Queue):
            return actor.run.remote(target)
        return actor.drain.remote(target) if actor is consumer else actor.fill.remote(target)

    with running([*crowds, consumer], start):
        yield consumer


def throughput(consumer: Any, warm_up: float = WARM_UP_SECONDS) -> dict[str, float]:
    """Return the groups and megabytes per second that the consumer gets."""
    time.sleep(warm_up)
    began, groups, size, _ = call(consumer.counts)
    time.sleep(SECONDS)
    ended, groups_now, size_now, _ = call(consumer.counts)
    elapsed = ended - began
    return {
        "groups_per_second": (groups_now - groups) / elapsed,
        "megabytes_per_second": (size_now - size) / elapsed / 1e6,
    }


@contextlib.contextmanager
def durable_broker(folder: Path) -> Iterator[BrokerClient]:
    """Run the broker with `synchronous = "full"` in a new folder."""
    config = QueuesConfig(
        max_staleness=FOREVER,
        window=WINDOW,
        queued_batches=2 * WINDOW // BATCH,
        patience_seconds=0.0,  # no engine ever gets a newer version here
        synchronous="full",
    )
    with tempfile.TemporaryDirectory(dir=folder) as directory:
        spec = RunSpec(groups_per_batch=BATCH, group_size=GROUP_SIZE, steps=FOREVER)
        handle = start_process(
            CountedBroker, Path(directory), config=config, spec=spec, at_once=MAX_CONCURRENCY
        )
        call(handle.opened)
        yield BrokerClient(handle)
        ray.kill(handle)


def compare(tokens: int, actors: int, folder: Path) -> Record:
    """Return the rates of the broker and of its ceilings at one setting."""
    at_once = min(32, 64_000 // tokens)  # groups: 256 rollouts, or 512,000 tokens
    with durable_broker(folder) as client, fast_actors(tokens, actors, client, at_once) as consumer:
        time.sleep(WARM_UP_SECONDS)
        syncs = call(client.handle.synced)
        broker = throughput(consumer, 0.0)
        syncs = call(client.handle.synced) - syncs
    rate = broker["groups_per_second"]
    groups_per_sync = max(1.0, rate * SECONDS / max(1, syncs))
    disk = write_and_sync(folder, template(tokens), groups_per_sync, SECONDS / 2)
    client = BrokerClient(start_process(EmptyBroker, tokens, at_once=MAX_CONCURRENCY))
    with fast_actors(tokens, actors, client, at_once) as consumer:
        empty = throughput(consumer)
    ray.kill(client.handle)
    queue = Queue(maxsize=WINDOW, actor_options={"num_cpus": 0})
    with fast_actors(tokens, actors, queue, at_once) as consumer:
        ray_queue = throughput(consumer)
    queue.shutdown(force=True)
    return {
        "broker": broker,
        "empty": empty,
        "disk": {"groups_per_second": disk, "groups_per_sync": groups_per_sync},
        "ray_queue": ray_queue,
        "of_ceiling": rate / min(disk, empty["groups_per_second"]),
        "of_ray_queue": rate / max(1e-9, ray_queue["groups_per_second"]),
    }


def soak(seconds: float, folder: Path) -> Record:
    """Measure the resident memory of the broker while groups go through it."""
    samples = []
    with durable_broker(folder) as client, fast_actors(1000, 16, client, 4) as consumer:
        process, until = process_of(client.handle), time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(min(5.0, seconds / 20))
            samples.append((call(consumer.counts)[1], process.memory_info().rss))
            print(f"soak: {samples[-1][0]:,} groups, {samples[-1][1] / 1e6:.0f} MB", flush=True)
    quarter = max(1, len(samples) // 4)
    early = statistics.median(rss for _, rss in samples[quarter : 2 * quarter] or samples[:1])
    late = statistics.median(rss for _, rss in samples[-quarter:])
    return {
        "seconds": seconds,
        "groups": samples[-1][0],
        "rss_second_quarter": early,
        "rss_last_quarter": late,
        "growth": late / early - 1,
        "samples": samples,
    }


def shares(names: Sequence[str], processes: int = PACED_PROCESSES) -> list[Sequence[str]]:
    """Distribute actors over processes: the timed ones first, the others in so many processes."""
    count = max(TIMED, len(names) // 8)
    others = names[count:]
    rest = [others[first::processes] for first in range(min(len(others), processes))]
    return [names[:count], *rest]


def pace_of(actors: int, rate: float) -> Pace:
    """Return the pace at which so many actors give so many groups a second; 0: all they can."""
    at_once = max(1, GROUPS // actors)
    return Pace(tokens=TOKENS, at_once=at_once, seconds=actors * at_once / rate if rate else 0.0)


def measure_setting(actors: int, rate: float, folder: Path) -> Record:
    """Return the figures of a control plane with so many actors at a rate of groups/s."""
    pace = pace_of(actors, rate)
    names = [f"engine-{index}" for index in range(actors)]
    crowds = [start_process(Crowd, share, pace) for share in shares(names)]
    consumer = start_process(Consumer)
    handles = {f"crowd-{index}": crowd for index, crowd in enumerate(crowds)}
    handles["learner"] = consumer
    with tempfile.TemporaryDirectory(dir=folder) as directory:
        batch = actors * pace.at_once
        config = QueuesConfig(max_staleness=2, window=2 * batch + batch // 4)
        spec = RunSpec(groups_per_batch=batch, group_size=GROUP_SIZE, steps=FOREVER)
        broker = create_broker(Path(directory), config=config, spec=spec)
        broadcaster = create_broadcaster(UPDATE_FRACTION, actors)
        handles |= {"broker": broker.handle, "broadcaster": broadcaster.handle}
        try:
            with running([*crowds, consumer], lambda actor: actor.run.remote(broker, broadcaster)):
                address = call(broker.handle.serve_metrics, MetricsAccess("127.0.0.1"))
                processes = {name: process_of(handle) for name, handle in handles.items()}
                time.sleep(max(PACED_WARM_UP_SECONDS, 2 * pace.seconds))
                ray.get([crowd.begin.remote() for crowd in crowds], timeout=CALL_SECONDS)
                before = counts(broker, consumer, processes)
                scrapes = scrape(f"http://{address}/metrics", crowds[0])
                after = counts(broker, consumer, processes)
                seconds = call(crowds[0].seconds)
                sizes = {
                    name: processes[name].memory_info().rss for name in ("broker", "broadcaster")
                }
        finally:
            for handle in (broker.handle, broadcaster.handle):
                ray.kill(handle)
    rates = {
        name: (count - before[name][0]) / (at - before[name][1])
        for name, (count, at) in after.items()
    }
    return {
        "actors": actors,
        "asked_groups_per_second": rate or None,
        "measured_seconds": after["groups"][1] - before["groups"][1],
        "accepted_groups_per_second": rates["accepted"],
        "trained_groups_per_second": rates["groups"],
        "versions_per_second": rates["batches"],
        "refused": int(after["refused"][0] - before["refused"][0]),
        "enough_puts": len(seconds["put"]) >= ENOUGH,
        "seconds": {name: quantiles(values) for name, values in seconds.items()},
        "scrape": quantiles(scrapes),
        "cores": {name: rates[name] for name in processes},
        "broker_groups_per_core_second": rates["accepted"] / rates["broker"],
        "megabytes": {name: size / 1e6 for name, size in sizes.items()},
    }


def counts(
    broker: BrokerClient, consumer: Any, processes: Mapping[str, psutil.Process]
) -> dict[str, tuple[float, float]]:
    """Return counts of broker and learner and CPU seconds of processes so far.

    Each has its time, since a saturated broker answers late.
    """
    status = call(broker.handle.status)
    at = time.perf_counter()
    learner_at, groups, _, batches = call(consumer.counts)
    cpu = {name: float(sum(process.cpu_times()[:2])) for name, process in processes.items()}
    now = time.perf_counter()
    return {
        "accepted": (status.accepted, at),
        "refused": (sum(status.refused.values()), at),
        "groups": (groups, learner_at),
        "batches": (batches, learner_at),
        **{name: (seconds, now) for name, seconds in cpu.items()},
    }


def scrape(url: str, timed: Any) -> list[float]:
    """Scrape metrics regularly until the measurement is over; return the seconds of each."""
    began, taken = time.perf_counter(), []
    while True:
        now = time.perf_counter()
        with urllib.request.urlopen(url, timeout=30) as answer:
            answer.read()
        taken.append(time.perf_counter() - now)
        time.sleep(SCRAPE_EVERY)
        passed = time.perf_counter() - began
        if passed >= PATIENCE * PACED_SECONDS:
            return taken
        if passed >= PACED_SECONDS and call(timed.puts) >= ENOUGH:
            return taken


def quantiles(values: Sequence[float]) -> dict[str, float] | None:
    """Return count, median, 99th percentile and largest; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    return {
        "count": len(ordered),
        "p50": ordered[len(ordered) // 2],
        "p99": ordered[int(len(ordered) * 0.99)],
        "max": ordered[-1],
    }

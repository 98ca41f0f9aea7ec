"""Rates of groups through the broker, a bare Ray actor, the disk and `ray.util.queue`."""

import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.util.queue import Queue

from benchmarks.broker.queue_workers import (
    WINDOW,
    Consumer,
    Producers,
    groups_at_once,
    start_broker,
    start_empty,
    start_process,
    template,
    write_and_sync,
)
from benchmarks.harness.study import Options, Record
from queues.ray_broker import BrokerClient

CALL_SECONDS = 120.0


WARM_UP_SECONDS, SECONDS = 2.0, 4.0
"""Duration of each measurement, and of what comes before it."""


PROCESSES = 2
"""Processes that simulate the actors."""


@contextlib.contextmanager
def driven(
    tokens: int, actors: int, target: BrokerClient | Queue, *, at_once: int
) -> Iterator[Any]:
    """Run producers and the consumer, which it yields; their processes end with the block."""
    names = [f"engine-{index}" for index in range(actors)]
    producers = [
        start_process(Producers, tokens, names[first::PROCESSES])
        for first in range(min(actors, PROCESSES))
    ]
    consumer = start_process(Consumer)
    if isinstance(target, Queue):
        work = [producer.fill.remote(target, at_once) for producer in producers]
        work.append(consumer.drain.remote(target))
    else:
        work = [producer.drive.remote(target, at_once) for producer in producers]
        work.append(consumer.run.remote(target))
    everyone = [*producers, consumer]
    try:
        yield consumer
        ray.get([actor.stop.remote() for actor in everyone], timeout=CALL_SECONDS)
        ready, _ = ray.wait(work, num_returns=len(work), timeout=5.0)
        ray.get(ready)  # whatever an actor raised
    finally:
        for actor in everyone:
            ray.kill(actor)


def throughput(consumer: Any, warm_up: float = WARM_UP_SECONDS) -> dict[str, float]:
    """Return the groups and megabytes per second that the consumer gets."""
    time.sleep(warm_up)
    began, groups, size, _ = ray.get(consumer.counts.remote(), timeout=CALL_SECONDS)
    time.sleep(SECONDS)
    ended, groups_now, size_now, _ = ray.get(consumer.counts.remote(), timeout=CALL_SECONDS)
    elapsed = ended - began
    return {
        "groups_per_second": (groups_now - groups) / elapsed,
        "megabytes_per_second": (size_now - size) / elapsed / 1e6,
    }


def compare(tokens: int, actors: int, folder: Path) -> Record:
    drive = partial(driven, tokens, actors, at_once=groups_at_once(tokens))
    with tempfile.TemporaryDirectory(dir=folder) as directory:
        actor, client = start_broker(Path(directory))
        with drive(client) as consumer:
            time.sleep(WARM_UP_SECONDS)
            syncs, _ = ray.get(actor.vitals.remote(), timeout=CALL_SECONDS)
            broker = throughput(consumer, 0.0)
            syncs = ray.get(actor.vitals.remote(), timeout=CALL_SECONDS)[0] - syncs
        ray.kill(actor)
    groups_per_sync = max(1.0, broker["groups_per_second"] * SECONDS / max(1, syncs))
    disk = write_and_sync(folder, template(tokens), groups_per_sync, SECONDS / 2)
    client = start_empty(tokens)
    with drive(client) as consumer:
        empty = throughput(consumer)
    ray.kill(client.handle)
    queue = Queue(maxsize=WINDOW, actor_options={"num_cpus": 0})
    with drive(queue) as consumer:
        ray_queue = throughput(consumer)
    queue.shutdown(force=True)
    rate = broker["groups_per_second"]
    return {
        "broker": broker,
        "empty": empty,
        "disk": {"groups_per_second": disk, "groups_per_sync": groups_per_sync},
        "ray_queue": ray_queue,
        "of_ceiling": rate / min(disk, empty["groups_per_second"]),
        "of_ray_queue": rate / max(1e-9, ray_queue["groups_per_second"]),
    }


def soak(options: Options, folder: Path) -> Record:
    """Measure the resident memory of the broker while groups go through it."""
    samples = []
    with tempfile.TemporaryDirectory(dir=folder) as directory:
        actor, client = start_broker(Path(directory))
        process = psutil.Process(ray.get(actor.vitals.remote(), timeout=CALL_SECONDS)[1])
        with driven(1000, 16, client, at_once=4) as consumer:
            until = time.monotonic() + options.soak
            while time.monotonic() < until:
                time.sleep(min(5.0, options.soak / 20))
                groups = ray.get(consumer.counts.remote(), timeout=CALL_SECONDS)[1]
                samples.append((groups, process.memory_info().rss))
                print(f"soak: {groups:,} groups, {samples[-1][1] / 1e6:.0f} MB", flush=True)
        ray.kill(actor)
    quarter = len(samples) // 4
    early = statistics.median(rss for _, rss in samples[quarter : 2 * quarter])
    late = statistics.median(rss for _, rss in samples[-quarter:])
    return {
        "seconds": options.soak,
        "groups": samples[-1][0],
        "rss_second_quarter": early,
        "rss_last_quarter": late,
        "growth": late / early - 1,
        "samples": samples,
    }

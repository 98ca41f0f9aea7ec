"""Rates, latencies and CPU seconds of broker and broadcaster with many simulated actors."""

import contextlib
import os
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import ray

from benchmarks.broker.queue_workers import FOREVER, GROUP_SIZE, Consumer, start_process
from benchmarks.broker.scale_workers import Crowd, Pace
from benchmarks.harness.study import Record
from headway.metrics import MetricsAccess
from queues.config import QueuesConfig, RunSpec
from queues.ray_broker import BrokerClient, create_broker
from weight_sync.ray_broadcaster import BroadcasterClient, create_broadcaster

GROUPS = 256


TIMED = 8
"""Actors that are timed, at least; an eighth of all where that is more."""


ENOUGH = 1000
"""Puts that are timed, unless that takes longer than PATIENCE measurements."""


PATIENCE = 10


CALL_SECONDS = 120.0


SCRAPE_EVERY = 2.0


SECONDS, WARM_UP_SECONDS = 12.0, 6.0
"""Duration of each measurement, and of what comes before it, at least."""


TOKENS = 100
"""Tokens of a rollout, 3 of them of the prompt."""


PROCESSES = 8
"""Processes that simulate the actors that are not timed."""


UPDATE_FRACTION = 0.25


def shares(names: Sequence[str], processes: int = PROCESSES) -> list[Sequence[str]]:
    """Distribute actors over processes: the timed ones first, the others in so many processes."""
    count = max(TIMED, len(names) // 8)
    others = names[count:]
    rest = [others[first::processes] for first in range(min(len(others), processes))]
    return [names[:count], *rest]


def groups_each(actors: int) -> int:
    """Return how many groups every actor generates at once."""
    return max(1, GROUPS // actors)


def generation_seconds(actors: int, rate: float) -> float:
    """Return the seconds of a group with which so many actors give so many groups per second."""
    return actors * groups_each(actors) / rate if rate else 0.0


@contextlib.contextmanager
def cluster_of(
    actors: int, rate: float, folder: Path
) -> Iterator[tuple[BrokerClient, BroadcasterClient, list[Any], Any]]:
    """Run broker, broadcaster, actors and consumer; their processes end with the block."""
    batch = actors * groups_each(actors)
    broker = create_broker(
        folder,
        config=QueuesConfig(max_staleness=2, window=2 * batch + batch // 4),
        spec=RunSpec(groups_per_batch=batch, group_size=GROUP_SIZE, steps=FOREVER),
    )
    broadcaster = create_broadcaster(UPDATE_FRACTION, actors)
    pace = Pace(TOKENS, groups_each(actors), generation_seconds(actors, rate))
    crowds = [
        start_process(Crowd, share, pace)
        for share in shares([f"engine-{index}" for index in range(actors)])
    ]
    consumer = start_process(Consumer)
    everyone = [*crowds, consumer]
    work = [actor.run.remote(broker, broadcaster) for actor in everyone]
    try:
        yield broker, broadcaster, crowds, consumer
        ended, _ = ray.wait(work, num_returns=1, timeout=0)
        ray.get(ended)  # whatever an actor raised
        ray.get([actor.stop.remote() for actor in everyone], timeout=CALL_SECONDS)
        ended, _ = ray.wait(work, num_returns=len(work), timeout=10.0)
        ray.get(ended)
    finally:
        for handle in (*everyone, broker.handle, broadcaster.handle):
            ray.kill(handle)


def process_of(handle: Any) -> psutil.Process:
    pid = handle.__ray_call__.remote(lambda _: os.getpid())
    return psutil.Process(ray.get(pid, timeout=CALL_SECONDS))


def call(method: Any) -> Any:
    """Return the answer of an actor's method."""
    return ray.get(method.remote(), timeout=CALL_SECONDS)


def measure_setting(actors: int, rate: float, folder: Path) -> Record:
    with (
        tempfile.TemporaryDirectory(dir=folder) as directory,
        cluster_of(actors, rate, Path(directory)) as (broker, sync, crowds, consumer),
    ):
        access = MetricsAccess("127.0.0.1")
        address = ray.get(broker.handle.serve_metrics.remote(access), timeout=CALL_SECONDS)
        handles = {"broker": broker.handle, "broadcaster": sync.handle, "learner": consumer}
        handles |= {f"crowd-{index}": crowd for index, crowd in enumerate(crowds)}
        processes = {name: process_of(handle) for name, handle in handles.items()}
        time.sleep(max(WARM_UP_SECONDS, 2 * generation_seconds(actors, rate)))
        ray.get([crowd.begin.remote() for crowd in crowds], timeout=CALL_SECONDS)
        before = counts(broker, consumer, processes)
        scrapes = scrape(f"http://{address}/metrics", crowds[0])
        after = counts(broker, consumer, processes)
        seconds = call(crowds[0].seconds)
        rates = {
            name: (count - before[name][0]) / (at - before[name][1])
            for name, (count, at) in after.items()
        }
        cores = {name: rates[name] for name in processes}
        return {
            "actors": actors,
            "asked_groups_per_second": rate or None,
            "measured_seconds": after["groups"][1] - before["groups"][1],
            "accepted_groups_per_second": rates["accepted"],
            "trained_groups_per_second": rates["groups"],
            "versions_per_second": rates["batches"],
            "refused": int(after["refused"][0] - before["refused"][0]),
            "enough_puts": len(seconds["put"]) >= ENOUGH,
            "seconds": {call: quantiles(values) for call, values in seconds.items()},
            "scrape": quantiles(scrapes),
            "cores": cores,
            "broker_groups_per_core_second": rates["accepted"] / cores["broker"],
            "megabytes": {
                name: processes[name].memory_info().rss / 1e6 for name in ("broker", "broadcaster")
            },
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
    cpu = {name: float(sum(one.cpu_times()[:2])) for name, one in processes.items()}
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
        if passed >= PATIENCE * SECONDS:
            return taken
        if passed >= SECONDS and call(timed.puts) >= ENOUGH:
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

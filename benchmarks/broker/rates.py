"""Rates, latencies and CPU seconds of broker and broadcaster with simulated actors."""

import asyncio
import contextlib
import os
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import ray

from benchmarks.broker.load import (
    FOREVER,
    GROUP_SIZE,
    Consumer,
    Crowd,
    Pace,
    make_lease,
    payload_of,
)
from benchmarks.harness.record import Record
from headway.metrics import MetricsAccess
from headway.ray_process import call_in
from queues.config import QueuesConfig, RunSpec
from queues.ray_broker import BrokerClient, create_broker
from weight_sync.ray_broadcaster import create_broadcaster

CALL_SECONDS = 120.0
GROUPS, GROUP_TOKENS = 256, 64_000
"""Groups that all actors generate at once, at least one each; tokens of a rollout times the groups
of an actor, at most."""
TIMED = 8
"""Actors that are timed, at least; an eighth of all where that is more."""
ENOUGH = 1000
"""Puts that are timed, unless that takes longer than PATIENCE measurements."""
PATIENCE = 10
PROCESSES = 8
"""Processes that simulate the actors, beside one of actors that are timed."""
WARM_UP_SECONDS, SECONDS = 6.0, 12.0
CEILING_GROUPS, CEILING_SECONDS = 32, 2.0
SERVICES = ("broker", "broadcaster")


def call(method: Any, *arguments: Any) -> Any:
    """Return the answer of an actor's method."""
    return ray.get(method.remote(*arguments), timeout=CALL_SECONDS)


@contextlib.contextmanager
def running(actors: Sequence[Any], *clients: Any) -> Iterator[None]:
    """Run actors with clients, all of which end with the block; raises what one of them raised."""
    work = [actor.run.remote(*clients) for actor in actors]
    try:
        yield
        ended, _ = ray.wait(work, num_returns=1, timeout=0)
        ray.get(ended)
        ray.get([actor.stop.remote() for actor in actors], timeout=CALL_SECONDS)
        ended, _ = ray.wait(work, num_returns=len(work), timeout=10.0)
        ray.get(ended)
    finally:
        for actor in actors:
            ray.kill(actor)


class Writer:
    """A process that makes what it is sent durable, and does nothing else."""

    def put(self, file: Path, payloads: Sequence[bytes]) -> None:
        """Append payloads to a file and wait until the disk has them."""
        with file.open("ab", buffering=0) as journal:
            journal.write(b"".join(payloads))
            os.fdatasync(journal.fileno())


def measure_ceiling(tokens: int, folder: Path) -> float:
    """Return the groups/s of Ray calls of CEILING_GROUPS groups that a thread writes and syncs."""
    file = folder / "ceiling"
    payloads = [payload_of(make_lease(number), tokens) for number in range(CEILING_GROUPS)]
    writer = ray.remote(Writer).options(num_cpus=0).remote()
    call(writer.put, file, payloads)
    seconds, until = [], time.perf_counter() + CEILING_SECONDS
    while (began := time.perf_counter()) < until:
        call(writer.put, file, payloads)
        seconds.append(time.perf_counter() - began)
    ray.kill(writer)
    file.unlink()
    return CEILING_GROUPS / median(seconds)


def shares(names: Sequence[str], processes: int = PROCESSES) -> list[Sequence[str]]:
    """Distribute actors over processes: the timed ones first, the others in so many processes."""
    count = max(TIMED, len(names) // 8)
    others = names[count:]
    rest = [others[first::processes] for first in range(min(len(others), processes))]
    return [names[:count], *rest]


def pace_of(actors: int, rate: float, tokens: int) -> Pace:
    """Return the pace at which so many actors give so many groups a second; 0: all they can."""
    at_once = max(1, min(GROUPS // actors, GROUP_TOKENS // tokens))
    return Pace(tokens=tokens, at_once=at_once, seconds=actors * at_once / rate if rate else 0.0)


def measure_setting(actors: int, rate: float, tokens: int, folder: Path) -> Record:
    """Return the figures of a control plane with so many actors at a rate of groups/s."""
    pace = pace_of(actors, rate, tokens)
    names = [f"engine-{index}" for index in range(actors)]
    crowd, learner = (
        ray.remote(kind).options(num_cpus=0, max_concurrency=100) for kind in (Crowd, Consumer)
    )
    crowds = [crowd.remote(share, pace) for share in shares(names)]
    consumer = learner.remote()
    handles = {f"crowd-{index}": crowd for index, crowd in enumerate(crowds)}
    handles["learner"] = consumer
    with tempfile.TemporaryDirectory(dir=folder) as directory:
        batch = actors * pace.at_once
        config = QueuesConfig(max_staleness=2, window=2 * batch + batch // 4)
        spec = RunSpec(groups_per_batch=batch, group_size=GROUP_SIZE, steps=FOREVER)
        broker = create_broker(Path(directory), config=config, spec=spec)
        broadcaster = create_broadcaster(0.25, actors)
        handles |= {"broker": broker.handle, "broadcaster": broadcaster.handle}
        try:
            with running([*crowds, consumer], broker, broadcaster):
                address = call(broker.handle.serve_metrics, MetricsAccess("127.0.0.1"))
                pids = {
                    name: asyncio.run(call_in(actor, lambda _: os.getpid()))
                    for name, actor in handles.items()
                }
                processes = {name: psutil.Process(pid) for name, pid in pids.items()}
                time.sleep(max(WARM_UP_SECONDS, 2 * pace.seconds))
                ray.get([crowd.begin.remote() for crowd in crowds], timeout=CALL_SECONDS)
                before = counts(broker, consumer, processes)
                scrapes = scrape(f"http://{address}/metrics", crowds[0])
                after = counts(broker, consumer, processes)
                seconds = call(crowds[0].seconds)
                sizes = {name: processes[name].memory_info().rss for name in SERVICES}
        finally:
            for name in SERVICES:
                ray.kill(handles[name])
    rates = {
        name: (count - before[name][0]) / (at - before[name][1])
        for name, (count, at) in after.items()
    }
    return {
        "actors": actors,
        "tokens": tokens,
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
    """Return counts and CPU seconds so far, each with its time: a saturated broker answers late."""
    status = call(broker.handle.status)
    at = time.perf_counter()
    learner_at, groups, batches = call(consumer.counts)
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
        time.sleep(2.0)
        passed = time.perf_counter() - began
        if passed >= PATIENCE * SECONDS or (
            passed >= SECONDS and len(call(timed.seconds)["put"]) >= ENOUGH
        ):
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

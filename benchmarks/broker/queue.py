"""Throughput of the broker, beside what Ray and the disk allow.

    headway bench queue [--soak 600]

For each number of simulated actors and each length, in the current folder: the durable broker, a
Ray actor that only answers the same messages, the same bytes written with as many fdatasyncs, and
`ray.util.queue`. `--soak` adds the broker's memory over so many seconds. Takes about 25 minutes.
"""

import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.util.queue import Queue

from benchmarks.broker.queue_workers import (
    GROUP_SIZE,
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
from benchmarks.harness.study import Options, Record, Study, medians_over, number, option
from queues.ray_broker import BrokerClient

OF_CEILING = 0.7
OF_RAY_QUEUE = {100: 5.0, 8000: 1.0}
"""Aim for the throughput over that of `ray.util.queue`, by tokens."""
GROWTH = 0.05
"""Aim for the growth of memory from the second quarter of the test to the last."""
CALL_SECONDS = 120.0
WARM_UP_SECONDS, SECONDS = 2.0, 4.0
"""Duration of each measurement, and of what comes before it."""
PROCESSES = 2
"""Processes that simulate the actors."""
COMPARED = ("broker", "empty", "disk", "ray_queue")


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


def measure(options: Options) -> Iterator[Record]:
    ray.init(num_cpus=PROCESSES + 2, include_dashboard=False, log_to_driver=False)
    settings = [(tokens, actors) for tokens in options.tokens for actors in options.actors]
    rounds: dict[tuple[int, int], list[Record]] = {setting: [] for setting in settings}
    with tempfile.TemporaryDirectory(dir=Path(), prefix=".bench-queue-") as name:
        folder = Path(name)
        for index in range(options.rounds):
            for tokens, actors in settings:
                measured = compare(tokens, actors, folder)
                rounds[tokens, actors].append(measured)
                figures = {"tokens": tokens, "actors": actors, **summarize([measured])}
                print(f"round {index + 1}: {describe(figures)}", flush=True)
        yield {
            "settings": [
                {"tokens": tokens, "actors": actors, **summarize(measured), "rounds": measured}
                for (tokens, actors), measured in rounds.items()
            ]
        }
        yield {"soak": soak(options, folder) if options.soak else None}
    ray.shutdown()


def summarize(rounds: Sequence[Record]) -> Record:
    """Return medians over the rounds of one setting; the ratios are of each round."""
    medians = medians_over(rounds)
    rates = {f"{name}_groups_per_second": medians[name]["groups_per_second"] for name in COMPARED}
    return {
        **rates,
        "broker_megabytes_per_second": medians["broker"]["megabytes_per_second"],
        "of_ceiling": medians["of_ceiling"],
        "of_ray_queue": medians["of_ray_queue"],
    }


def conclude(record: Record) -> Record:
    misses = []
    for setting in record["settings"]:
        name = f"{setting['tokens']} tokens, {setting['actors']} actors"
        if setting["of_ceiling"] < OF_CEILING:
            misses.append(f"{name}: {setting['of_ceiling']:.2f} of the ceiling, aim {OF_CEILING:g}")
        aim = OF_RAY_QUEUE.get(setting["tokens"], 0.0)
        if setting["of_ray_queue"] < aim:
            misses.append(f"{name}: {setting['of_ray_queue']:.1f} × ray.util.queue, aim {aim:g}")
    soaked = record.get("soak")
    if soaked and soaked["growth"] > GROWTH:
        misses.append(f"memory grows by {soaked['growth']:.0%}, aim {GROWTH:.0%}")
    return {"misses": misses}


def describe(figures: Record) -> str:
    return (
        f"{figures['tokens']:5d} tokens, {figures['actors']:2d} actors:"
        f" {figures['broker_groups_per_second']:7,.0f}"
        f" groups/s {figures['broker_megabytes_per_second']:6.1f} MB/s"
        f" | Ray allows {figures['empty_groups_per_second']:7,.0f},"
        f" the disk {figures['disk_groups_per_second']:7,.0f}"
        f" | {figures['of_ceiling']:.2f} of the lower,"
        f" {figures['of_ray_queue']:.1f} × ray.util.queue"
    )


def table(record: Record) -> str:
    lines = [f"\nmedians of {record['arguments']['rounds']} rounds, groups of {GROUP_SIZE}"]
    lines += [describe(setting) for setting in record["settings"]]
    if soaked := record["soak"]:
        lines.append(f"memory over {soaked['seconds']:g} s: {100 * soaked['growth']:+.1f}%")
    return "\n".join(lines)


COUNT = number(int, 1)
STUDY = Study(
    name="queue",
    about=__doc__,
    options=(
        option("--actors", [1, 4, 16, 64], "simulated", type=COUNT),
        option("--tokens", [100, 1000, 8000], "of each rollout", type=number(int, 4)),
        option("--rounds", 3, "of all measurements", type=COUNT),
        option("--soak", 0.0, "seconds of the memory test; 0: none"),
    ),
    file="queue.json",
    measure=measure,
    conclude=conclude,
    table=table,
    misses=lambda record: record["misses"],
)

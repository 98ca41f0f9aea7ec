"""Throughput of the broker, beside what Ray and the disk allow.

    headway bench queue                 groups/s and MB/s, and 1,000 actors in one process
    headway bench queue --soak 600      memory of the broker over ten minutes as well

In one run, round by round, for each number of simulated actors and each length: the broker with
durability on, a Ray actor that only answers the same messages, the same bytes written with as many
fdatasyncs, and `ray.util.queue`. The figure of merit is the broker over the lower of the first two
ceilings, at least 0.7; against `ray.util.queue` at least 5 at the shortest length, and 1 at the
longest. Medians of ratios inside a round. It takes about 25 minutes on two cores, and as much
longer as --soak says.
"""

import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
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
    template,
    write_and_sync,
)
from benchmarks.harness.study import Options, Record, Study, number, option
from deploy.errors import InputError
from queues.ray_broker import BrokerClient

OF_CEILING = 0.7
OF_RAY_QUEUE = {100: 5.0, 8000: 1.0}
"""Aim for the throughput over that of `ray.util.queue`, by tokens."""
GROWTH = 0.05
"""Aim for the growth of memory from the second quarter of the test to the last."""
CALL_SECONDS = 120.0
COMPARED = ("broker", "empty", "disk", "ray_queue")


@contextlib.contextmanager
def driven(
    tokens: int, actors: int, processes: int, target: BrokerClient | Queue, *, at_once: int
) -> Iterator[tuple[list[Any], Any]]:
    """Run producers and the consumer; their processes end with the block."""
    names = [f"engine-{index}" for index in range(actors)]
    producers = [
        Producers.remote(tokens, names[first::processes]) for first in range(min(actors, processes))
    ]
    consumer = Consumer.remote()
    if isinstance(target, Queue):
        work = [producer.fill.remote(target, at_once) for producer in producers]
        work.append(consumer.drain.remote(target))
    else:
        work = [producer.drive.remote(target, at_once) for producer in producers]
        work.append(consumer.run.remote(target))
    everyone = [*producers, consumer]
    try:
        yield producers, consumer
        ray.get([actor.stop.remote() for actor in everyone], timeout=CALL_SECONDS)
        ready, _ = ray.wait(work, num_returns=len(work), timeout=5.0)
        ray.get(ready)  # whatever an actor raised
    finally:
        for actor in everyone:
            ray.kill(actor)


def throughput(consumer: Any, warm_up: float, seconds: float) -> dict[str, float]:
    """Return the groups and megabytes per second that the consumer gets."""
    time.sleep(warm_up)
    began, groups, size, _ = ray.get(consumer.counts.remote(), timeout=CALL_SECONDS)
    time.sleep(seconds)
    ended, groups_now, size_now, _ = ray.get(consumer.counts.remote(), timeout=CALL_SECONDS)
    elapsed = ended - began
    return {
        "groups_per_second": (groups_now - groups) / elapsed,
        "megabytes_per_second": (size_now - size) / elapsed / 1e6,
    }


def compare(tokens: int, actors: int, options: Options, folder: Path) -> Record:
    """Measure one round of one setting."""
    at_once, seconds = groups_at_once(tokens), options.seconds

    def drive(target: Any) -> Any:
        return driven(tokens, actors, options.processes, target, at_once=at_once)

    with tempfile.TemporaryDirectory(dir=folder) as directory:
        actor, client = start_broker(Path(directory))
        with drive(client) as (_, consumer):
            time.sleep(options.warm_up)
            syncs, _ = ray.get(actor.vitals.remote(), timeout=CALL_SECONDS)
            broker = throughput(consumer, 0.0, seconds)
            syncs = ray.get(actor.vitals.remote(), timeout=CALL_SECONDS)[0] - syncs
        ray.kill(actor)
    groups_per_sync = max(1.0, broker["groups_per_second"] * seconds / max(1, syncs))
    disk = write_and_sync(folder, template(tokens), groups_per_sync, seconds / 2)
    client = start_empty(tokens)
    with drive(client) as (_, consumer):
        empty = throughput(consumer, options.warm_up, seconds)
    ray.kill(client.handle)
    queue = Queue(maxsize=WINDOW, actor_options={"num_cpus": 0})
    with drive(queue) as (_, consumer):
        ray_queue = throughput(consumer, options.warm_up, seconds)
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


def crowd(options: Options, folder: Path) -> Record:
    """Measure many actors in one process: the groups of each, and the seconds of calls."""
    with tempfile.TemporaryDirectory(dir=folder) as directory:
        actor, client = start_broker(Path(directory))
        with driven(100, options.crowd, 1, client, at_once=1) as ((producers,), consumer):
            time.sleep(3 * options.warm_up)  # a thousand engines report their versions first
            ray.get(producers.begin.remote(), timeout=CALL_SECONDS)
            speed = throughput(consumer, 0.0, 2 * options.seconds)
            served, seconds = ray.get(producers.figures.remote(), timeout=CALL_SECONDS)
        ray.kill(actor)
    counts = sorted(served.values())
    return {
        "actors": options.crowd,
        **speed,
        "served": {"least": counts[0], "median": statistics.median(counts), "most": counts[-1]},
        "seconds": {
            call: dict(zip(("p50", "p99", "max"), quantiles(values), strict=True))
            for call, values in seconds.items()
        },
    }


def quantiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, the 99th percentile and the largest value."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)], ordered[-1]


def soak(options: Options, folder: Path) -> Record:
    """Measure the resident memory of the broker while groups go through it."""
    samples = []
    with tempfile.TemporaryDirectory(dir=folder) as directory:
        actor, client = start_broker(Path(directory))
        process = psutil.Process(ray.get(actor.vitals.remote(), timeout=CALL_SECONDS)[1])
        with driven(1000, 16, options.processes, client, at_once=4) as (_, consumer):
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
    """Measure all settings round by round, then many actors, then memory."""
    ray.init(num_cpus=options.processes + 2, include_dashboard=False, log_to_driver=False)
    settings = [(tokens, actors) for tokens in options.tokens for actors in options.actors]
    rounds: dict[tuple[int, int], list[Record]] = {setting: [] for setting in settings}
    with tempfile.TemporaryDirectory(dir=options.dir, prefix=".bench-queue-") as name:
        folder = Path(name)
        for index in range(options.rounds):
            for tokens, actors in settings:
                measured = compare(tokens, actors, options, folder)
                rounds[tokens, actors].append(measured)
                figures = {"tokens": tokens, "actors": actors, **summarize([measured])}
                print(f"round {index + 1}: {describe(figures)}", flush=True)
        yield {
            "settings": [
                {"tokens": tokens, "actors": actors, **summarize(measured), "rounds": measured}
                for (tokens, actors), measured in rounds.items()
            ]
        }
        yield {"crowd": crowd(options, folder) if options.crowd else None}
        yield {"soak": soak(options, folder) if options.soak else None}
    ray.shutdown()


def summarize(rounds: Sequence[Record]) -> Record:
    """Return medians over the rounds of one setting; the ratios are of each round."""

    def median(pick: Any) -> float:
        return statistics.median(pick(measured) for measured in rounds)

    return {
        **{
            f"{name}_groups_per_second": median(lambda m, name=name: m[name]["groups_per_second"])
            for name in COMPARED
        },
        "broker_megabytes_per_second": median(lambda m: m["broker"]["megabytes_per_second"]),
        "of_ceiling": median(lambda m: m["of_ceiling"]),
        "of_ray_queue": median(lambda m: m["of_ray_queue"]),
    }


def conclude(record: Record) -> Record:
    """Return the aims that are missed."""
    misses = []
    for setting in record["settings"]:
        name = f"{setting['tokens']} tokens, {setting['actors']} actors"
        if setting["of_ceiling"] < OF_CEILING:
            misses.append(f"{name}: {setting['of_ceiling']:.2f} of the ceiling, aim {OF_CEILING:g}")
        aim = OF_RAY_QUEUE.get(setting["tokens"], 0.0)
        if setting["of_ray_queue"] < aim:
            misses.append(f"{name}: {setting['of_ray_queue']:.1f} × ray.util.queue, aim {aim:g}")
    crowded, soaked = record.get("crowd"), record.get("soak")
    if crowded and not crowded["served"]["least"]:
        misses.append("some of many actors were never served")
    if soaked and soaked["growth"] > GROWTH:
        misses.append(f"memory grows by {soaked['growth']:.0%}, aim {GROWTH:.0%}")
    return {"misses": misses}


def describe(figures: Record) -> str:
    """Return one setting as a line."""
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
    """Return the medians of all settings."""
    lines = [f"\nmedians of {record['arguments']['rounds']} rounds, groups of {GROUP_SIZE}"]
    lines += [describe(setting) for setting in record["settings"]]
    if crowded := record["crowd"]:
        served, put = crowded["served"], crowded["seconds"]["put"]
        lines.append(
            f"{crowded['actors']:,} actors in one process: {crowded['groups_per_second']:,.0f}"
            f" groups/s, each actor served {served['least']} to {served['most']} times; a put takes"
            f" {1e3 * put['p50']:.0f} ms, p99 {1e3 * put['p99']:.0f} ms"
        )
    if soaked := record["soak"]:
        lines.append(f"memory over {soaked['seconds']:g} s: {100 * soaked['growth']:+.1f}%")
    return "\n".join(lines)


def check(options: Options) -> None:
    """Refuse a --dir that is no folder."""
    if not options.dir.is_dir():
        raise InputError(f"--dir {options.dir} must be a folder")


COUNT = number(int, 1)
STUDY = Study(
    name="queue",
    about=__doc__,
    options=(
        option("--actors", [1, 4, 16, 64], "simulated", type=COUNT),
        option("--tokens", [100, 1000, 8000], "of each rollout", type=number(int, 4)),
        option("--rounds", 3, "of all measurements", type=COUNT),
        option("--seconds", 4.0, "of each measurement"),
        option("--warm-up", 2.0, "seconds before it"),
        option("--processes", 2, "that simulate the actors", type=COUNT),
        option("--crowd", 1000, "actors in one process; 0: none"),
        option("--soak", 0.0, "seconds of the memory test; 0: none"),
        option("--dir", Path(), "a folder on the disk to test, the current by default", type=Path),
    ),
    check=check,
    file="queue.json",
    measure=measure,
    conclude=conclude,
    table=table,
    misses=lambda record: record["misses"],
)

if __name__ == "__main__":
    STUDY.main()

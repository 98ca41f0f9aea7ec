"""Measures what goes through the broker, beside what Ray and the disk allow.

    headway bench queue                 groups/s and MB/s, and 1,000 actors in one process
    headway bench queue --soak 600      memory of the broker over ten minutes as well

In one run, round by round, for each number of simulated actors and each length: the broker with
durability on, a Ray actor that only answers the same messages, the same bytes written with as many
fdatasyncs, and `ray.util.queue`. The figure of merit is the broker over the lower of the first two
ceilings, at least 0.7; against `ray.util.queue` at least 5 at the shortest length, and 1 at the
longest. Medians of ratios inside a round; raw numbers are stored under benchmarks/results/.
"""

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.util.queue import Queue

from benchmarks.broker.queue_arms import (
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
from benchmarks.harness.provenance import RESULTS, environment, reserve, store

OF_CEILING = 0.7
OF_RAY_QUEUE = {100: 5.0, 8000: 1.0}
"""Times `ray.util.queue`, by tokens."""
PLACES = ("dir", "out")
"""Options that say nothing about a measurement."""
GROWTH = 0.05
"""Of the memory, from the second quarter of the test to the last."""
CALL_SECONDS = 120.0


@contextlib.contextmanager
def driven(
    tokens: int, actors: int, processes: int, drive: dict[str, Any], *, at_once: int
) -> Iterator[tuple[list[Any], Any]]:
    """Producers and the consumer at work; ended, and their processes with them, afterwards."""
    names = [f"engine-{number}" for number in range(actors)]
    producers = [
        Producers.remote(tokens, names[first::processes]) for first in range(min(actors, processes))
    ]
    consumer = Consumer.remote()
    if "queue" in drive:
        work = [each.fill.remote(drive["queue"], at_once) for each in producers]
        work.append(consumer.drain.remote(drive["queue"]))
    else:
        work = [each.drive.remote(drive["client"], at_once) for each in producers]
        work.append(consumer.drive.remote(drive["client"]))
    everyone = [*producers, consumer]
    try:
        yield producers, consumer
        ray.get([each.stop.remote() for each in everyone], timeout=CALL_SECONDS)
        ready, _ = ray.wait(work, num_returns=len(work), timeout=5.0)
        ray.get(ready)  # whatever an actor raised
    finally:
        for each in everyone:
            ray.kill(each)


def measure(consumer: Any, warm_up: float, seconds: float) -> dict[str, float]:
    """Groups and megabytes a second that the consumer gets."""
    time.sleep(warm_up)
    began, groups, size = ray.get(consumer.counts.remote(), timeout=CALL_SECONDS)
    time.sleep(seconds)
    ended, groups_now, size_now = ray.get(consumer.counts.remote(), timeout=CALL_SECONDS)
    elapsed = ended - began
    return {
        "groups_per_second": (groups_now - groups) / elapsed,
        "megabytes_per_second": (size_now - size) / elapsed / 1e6,
    }


def compare(tokens: int, actors: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One round of one setting: every arm once."""
    shape = {"tokens": tokens, "actors": actors, "processes": options.processes}
    at_once = groups_at_once(tokens)
    payload = template(tokens)
    with tempfile.TemporaryDirectory(dir=folder) as directory:
        actor, client = start_broker(Path(directory))
        with driven(**shape, drive={"client": client}, at_once=at_once) as (_, consumer):
            time.sleep(options.warm_up)
            syncs, _ = ray.get(actor.vitals.remote(), timeout=CALL_SECONDS)
            broker = measure(consumer, 0.0, options.seconds)
            syncs = ray.get(actor.vitals.remote(), timeout=CALL_SECONDS)[0] - syncs
        ray.kill(actor)
    groups_per_sync = max(1.0, broker["groups_per_second"] * options.seconds / max(1, syncs))
    disk = write_and_sync(folder, payload, groups_per_sync, options.seconds / 2)
    client = start_empty(tokens)
    with driven(**shape, drive={"client": client}, at_once=at_once) as (_, consumer):
        empty = measure(consumer, options.warm_up, options.seconds)
    ray.kill(client.handle)
    queue = Queue(maxsize=WINDOW, actor_options={"num_cpus": 0})
    with driven(**shape, drive={"queue": queue}, at_once=at_once) as (_, consumer):
        ray_queue = measure(consumer, options.warm_up, options.seconds)
    queue.shutdown(force=True)
    ceiling = min(disk, empty["groups_per_second"])
    return {
        "broker": broker,
        "empty": empty,
        "disk": {"groups_per_second": disk, "groups_per_sync": groups_per_sync},
        "ray_queue": ray_queue,
        "of_ceiling": broker["groups_per_second"] / ceiling,
        "of_ray_queue": broker["groups_per_second"] / max(1e-9, ray_queue["groups_per_second"]),
    }


def crowd(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One process with many actors: is everyone served, and how long do calls take?"""
    actors = options.crowd
    with tempfile.TemporaryDirectory(dir=folder) as directory:
        actor, client = start_broker(Path(directory))
        with driven(100, actors, 1, {"client": client}, at_once=1) as ((producers,), consumer):
            time.sleep(3 * options.warm_up)  # a thousand engines report their versions first
            ray.get(producers.begin.remote(), timeout=CALL_SECONDS)
            speed = measure(consumer, 0.0, 2 * options.seconds)
            served, seconds = ray.get(producers.figures.remote(), timeout=CALL_SECONDS)
        ray.kill(actor)
    counts = sorted(served.values())
    latency = {
        call: dict(zip(("p50", "p99", "max"), quantiles(values), strict=True))
        for call, values in seconds.items()
    }
    return {
        "actors": actors,
        **speed,
        "served": {"least": counts[0], "median": statistics.median(counts), "most": counts[-1]},
        "seconds": latency,
    }


def quantiles(values: list[float]) -> tuple[float, float, float]:
    """Median, 99th percentile and largest."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)], ordered[-1]


def soak(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Resident memory of the broker while groups go through it."""
    samples = []
    with tempfile.TemporaryDirectory(dir=folder) as directory:
        actor, client = start_broker(Path(directory))
        process = psutil.Process(ray.get(actor.vitals.remote(), timeout=CALL_SECONDS)[1])
        with driven(1000, 16, options.processes, {"client": client}, at_once=4) as (_, consumer):
            until = time.monotonic() + options.soak
            while time.monotonic() < until:
                time.sleep(min(5.0, options.soak / 20))
                groups = ray.get(consumer.counts.remote(), timeout=CALL_SECONDS)[1]
                samples.append((groups, process.memory_info().rss))
                say(f"soak: {groups:,} groups, {samples[-1][1] / 1e6:.0f} MB")
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


def summarise(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds of one setting; the ratios are of each round."""
    rate = "groups_per_second"
    figures = {
        f"{arm}_groups_per_second": statistics.median(each[arm][rate] for each in rounds)
        for arm in ("broker", "empty", "disk", "ray_queue")
    }
    figures["broker_megabytes_per_second"] = statistics.median(
        each["broker"]["megabytes_per_second"] for each in rounds
    )
    for ratio in ("of_ceiling", "of_ray_queue"):
        figures[ratio] = statistics.median(each[ratio] for each in rounds)
    return figures


def misses(
    results: list[dict[str, Any]],
    crowded: dict[str, Any] | None = None,
    soaked: dict[str, Any] | None = None,
) -> list[str]:
    """What falls short of the aims, a line each."""
    found = []
    for each in results:
        name = f"{each['tokens']} tokens, {each['actors']} actors"
        if each["of_ceiling"] < OF_CEILING:
            found.append(f"{name}: {each['of_ceiling']:.2f} of the ceiling, aim {OF_CEILING:g}")
        aim = OF_RAY_QUEUE.get(each["tokens"], 0.0)
        if each["of_ray_queue"] < aim:
            found.append(f"{name}: {each['of_ray_queue']:.1f} × ray.util.queue, aim {aim:g}")
    if crowded is not None and not crowded["served"]["least"]:
        found.append("some of many actors were never served")
    if soaked is not None and soaked["growth"] > GROWTH:
        found.append(f"memory grows by {soaked['growth']:.0%}, aim {GROWTH:.0%}")
    return found


def say(text: str) -> None:
    """Progress."""
    print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="headway bench queue",
        description=__doc__,
        epilog="It takes about 25 minutes on two cores, and as much longer as --soak says.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--actors", type=int, nargs="+", default=[1, 4, 16, 64], help="simulated (1 4 16 64)"
    )
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[100, 1000, 8000],
        help="of each rollout (100 1000 8000)",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3, help="of all measurements (3)")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement (4)")
    parser.add_argument("--warm-up", type=float, default=2.0, help="seconds before it (2)")
    parser.add_argument("--processes", type=int, default=2, help="that simulate the actors (2)")
    parser.add_argument(
        "--crowd", type=int, default=1000, help="actors in one process (1000); 0: none"
    )
    parser.add_argument(
        "--soak", type=float, default=0.0, help="seconds of the memory test (0: none)"
    )
    parser.add_argument(
        "--dir", type=Path, default=Path.cwd(), help="a folder on the disk to test (the current)"
    )
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "queue.json",
        help="file of the raw numbers (benchmarks/results/queue.json)",
    )  # fmt: skip
    options = parser.parse_args()
    if not options.dir.is_dir():
        parser.error(f"--dir {options.dir} must be a folder")
    reserve(options.out)
    ray.init(num_cpus=options.processes + 2, include_dashboard=False, log_to_driver=False)
    settings = [(tokens, actors) for tokens in options.tokens for actors in options.actors]
    rounds: dict[tuple[int, int], list[dict[str, Any]]] = {each: [] for each in settings}
    results = []
    with tempfile.TemporaryDirectory(dir=options.dir, prefix=".bench-queue-") as name:
        folder = Path(name)
        for round_ in range(options.rounds):
            for tokens, actors in settings:
                found = compare(tokens, actors, options, folder)
                rounds[tokens, actors].append(found)
                say(f"round {round_ + 1}: {line(tokens, actors, summarise([found]))}")
        for (tokens, actors), each in rounds.items():
            figures = summarise(each)
            results.append({"tokens": tokens, "actors": actors, **figures, "rounds": each})
        crowded = crowd(options, folder) if options.crowd else None
        soaked = soak(options, folder) if options.soak else None
    ray.shutdown()
    say(f"\nmedians of {options.rounds} rounds, groups of {GROUP_SIZE}")
    for result in results:
        say(line(result["tokens"], result["actors"], result))
    if crowded is not None:
        put = crowded["seconds"]["put"]
        say(
            f"{crowded['actors']:,} actors in one process: {crowded['groups_per_second']:,.0f}"
            f" groups/s, each actor served {crowded['served']['least']} to"
            f" {crowded['served']['most']} times; a put takes {1e3 * put['p50']:.0f} ms,"
            f" p99 {1e3 * put['p99']:.0f} ms"
        )
    if soaked is not None:
        say(f"memory over {soaked['seconds']:g} s: {100 * soaked['growth']:+.1f}%")
    record = environment() | {
        "arguments": {key: value for key, value in vars(options).items() if key not in PLACES},
        "settings": results,
        "crowd": crowded,
        "soak": soaked,
        "misses": (missed := misses(results, crowded, soaked)),
    }
    for miss in missed:
        say(f"short of the aim: {miss}")
    store(record, options.out)
    sys.exit(bool(missed))


def line(tokens: int, actors: int, figures: dict[str, Any]) -> str:
    """One setting on a line."""
    return (
        f"{tokens:5d} tokens, {actors:2d} actors: {figures['broker_groups_per_second']:7,.0f}"
        f" groups/s {figures['broker_megabytes_per_second']:6.1f} MB/s"
        f" | Ray allows {figures['empty_groups_per_second']:7,.0f},"
        f" the disk {figures['disk_groups_per_second']:7,.0f}"
        f" | {figures['of_ceiling']:.2f} of the lower,"
        f" {figures['of_ray_queue']:.1f} × ray.util.queue"
    )


if __name__ == "__main__":
    main()

"""What the control plane of a run costs as the cluster grows: 8 to 1,024 simulated actors.

    headway bench scale [--actors 8 64 512 1024] [--rates 200 0]

Broker with admission and ledger, broadcaster, and metrics are the real ones, each a process of Ray;
actors and learner are simulated (`scale_arms`). Together the actors generate GROUPS groups at once,
or one each where they are more, and a batch has as many. For each number of actors and each rate of
groups/s that they would give by themselves (0: generation takes no time) it shows what came
through, how long calls took, the share of a core that broker and broadcaster got, what the broker
would carry with a core of its own at that cost a group, their memory, and how long a scrape took.

Calls are timed in a process that has WITNESSES of the actors, so that they do not wait for the
simulation of the others. The figure of merit is the 99th percentile of all calls that need not wait
for anybody (put, heartbeat, serving): at most 100 ms at 200 groups/s. Raw numbers are stored under
benchmarks/results/.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import ray

from benchmarks.environment import environment
from benchmarks.queue_arms import GROUP_SIZE
from benchmarks.scale_arms import FOREVER, Crowd, Learner
from queues.config import QueuesConfig
from queues.ray_broker import BrokerClient, create_broker
from weight_sync.ray_broadcaster import BroadcasterClient, create_broadcaster

RESULTS = Path(__file__).parent / "results"
CONTROL = ("put", "heartbeat", "serving")
"""Calls that wait for nobody: what they take is the broker's own doing."""
AIM_SECONDS = 0.1
AIM_SHARE = 0.95
"""Of the groups/s that were asked for; with less, calls were fast because there were few."""
GROUPS = 256
WITNESSES = 32
CALL_SECONDS = 120.0
SCRAPE_EVERY = 2.0


def quantiles(values: Sequence[float]) -> dict[str, float] | None:
    """Count, median, 99th percentile and largest; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return {
        "count": len(ordered),
        "p50": ordered[len(ordered) // 2],
        "p99": ordered[int(len(ordered) * 0.99)],
        "max": ordered[-1],
    }


def with_control(seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    """Seconds of every call, and of those in CONTROL together."""
    return {**seconds, "control": [x for call in CONTROL for x in seconds[call]]}


def shares(names: Sequence[str], processes: int) -> list[Sequence[str]]:
    """Who is simulated where: the witnesses first, the others in so many processes."""
    others = names[WITNESSES:]
    rest = [others[first::processes] for first in range(min(len(others), processes))]
    return [names[:WITNESSES], *rest]


def groups_each(actors: int) -> int:
    """Groups that every actor generates at once."""
    return max(1, GROUPS // actors)


def generation_seconds(actors: int, rate: float) -> float:
    """What a group has to take so that so many actors give so many groups a second."""
    return actors * groups_each(actors) / rate if rate else 0.0


@contextlib.contextmanager
def cluster_of(
    actors: int, rate: float, options: argparse.Namespace, folder: Path
) -> Iterator[tuple[BrokerClient, BroadcasterClient, list[Any], Any]]:
    """Everybody at work; their processes are ended afterwards."""
    batch = actors * groups_each(actors)
    broker = create_broker(
        folder,
        config=QueuesConfig(max_staleness=2, window=2 * batch + batch // 4),
        groups_per_batch=batch,
        group_size=GROUP_SIZE,
        steps=FOREVER,
    )
    broadcaster = create_broadcaster(options.update_fraction, actors)
    names = [f"engine-{number}" for number in range(actors)]
    seconds = generation_seconds(actors, rate)
    each = groups_each(actors)
    crowds = [
        Crowd.remote(options.tokens, share, each, seconds)
        for share in shares(names, options.processes)
    ]
    learner = Learner.remote()
    everyone = [*crowds, learner]
    work = [each.run.remote(broker, broadcaster) for each in everyone]
    try:
        yield broker, broadcaster, crowds, learner
        ended, _ = ray.wait(work, num_returns=1, timeout=0)
        ray.get(ended)  # whatever somebody raised
        ray.get([each.stop.remote() for each in everyone], timeout=CALL_SECONDS)
        ended, _ = ray.wait(work, num_returns=len(work), timeout=10.0)
        ray.get(ended)
    finally:
        for handle in (*everyone, broker._actor, broadcaster.actor):
            ray.kill(handle)


def process_of(handle: Any) -> psutil.Process:
    """The process of a Ray actor."""
    found = handle.__ray_call__.remote(lambda _: os.getpid())
    return psutil.Process(ray.get(found, timeout=CALL_SECONDS))


def measure(actors: int, rate: float, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One setting."""
    with (
        tempfile.TemporaryDirectory(dir=folder) as directory,
        cluster_of(actors, rate, options, Path(directory)) as (broker, sync, crowds, learner),
    ):
        address = ray.get(broker._actor.serve_metrics.remote("127.0.0.1"), timeout=CALL_SECONDS)
        processes = {"broker": process_of(broker._actor), "broadcaster": process_of(sync.actor)}
        warm_up = max(options.warm_up, 2 * generation_seconds(actors, rate))
        time.sleep(warm_up)
        ray.get([each.begin.remote() for each in crowds], timeout=CALL_SECONDS)
        before = ray.get(learner.counts.remote(), timeout=CALL_SECONDS)
        busy = {name: sum(each.cpu_times()[:2]) for name, each in processes.items()}
        scrapes = scrape(f"http://{address}/metrics", options.seconds)
        after = ray.get(learner.counts.remote(), timeout=CALL_SECONDS)
        found = ray.get([each.figures.remote() for each in crowds], timeout=CALL_SECONDS)
        passed = after[0] - before[0]
        seconds = with_control(found[0][0])
        put = sum(len(calls["put"]) for calls, _ in found) / passed
        cores = {
            name: (sum(each.cpu_times()[:2]) - busy[name]) / passed
            for name, each in processes.items()
        }
        return {
            "actors": actors,
            "asked_groups_per_second": rate or None,
            "put_groups_per_second": put,
            "trained_groups_per_second": (after[1] - before[1]) / passed,
            "versions_per_second": (after[2] - before[2]) / passed,
            "refused": sum(refused for _, refused in found),
            "seconds": {call: quantiles(values) for call, values in seconds.items()},
            "scrape": quantiles(scrapes),
            "cores": cores,
            "broker_groups_per_core_second": put / cores["broker"],
            "megabytes": {name: each.memory_info().rss / 1e6 for name, each in processes.items()},
        }


def scrape(url: str, seconds: float) -> list[float]:
    """Asks for metrics every so often, for so long; seconds of each answer."""
    until, taken = time.perf_counter() + seconds, []
    while (now := time.perf_counter()) < until:
        with urllib.request.urlopen(url, timeout=30) as answer:
            answer.read()
        taken.append(time.perf_counter() - now)
        time.sleep(max(0.0, min(SCRAPE_EVERY, until - time.perf_counter())))
    return taken


def line(found: dict[str, Any]) -> str:
    """One setting on a line."""

    def milliseconds(call: str) -> str:
        each = found["seconds"][call]
        return "–" if each is None else f"{1e3 * each['p50']:.0f}/{1e3 * each['p99']:.0f}"

    asked = found["asked_groups_per_second"]
    return (
        f"{found['actors']:5d} actors, {'at most' if asked is None else f'{asked:g}':>7} asked:"
        f" {found['put_groups_per_second']:6,.0f} groups/s; ms p50/p99: put {milliseconds('put')},"
        f" control {milliseconds('control')}, announced {milliseconds('announced')}, permit"
        f" {milliseconds('permit')}; scrape {1e3 * found['scrape']['max']:.0f} ms at most; broker"
        f" {found['cores']['broker']:.2f} cores, so {found['broker_groups_per_core_second']:,.0f}"
        f" groups/s of a whole one, {found['megabytes']['broker']:.0f} MB, broadcaster"
        f" {found['cores']['broadcaster']:.2f} cores {found['megabytes']['broadcaster']:.0f} MB"
    )


def met(setting: dict[str, Any]) -> bool:
    """Whether calls were fast enough at the rate that was asked for."""
    came = setting["put_groups_per_second"] >= AIM_SHARE * setting["asked_groups_per_second"]
    return bool(came and setting["seconds"]["control"]["p99"] <= AIM_SECONDS)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="headway bench scale", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--actors", type=int, nargs="+", default=[8, 32, 128, 512, 1024])
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[200.0, 0.0], help="groups/s; 0: all they can"
    )
    parser.add_argument("--tokens", type=int, default=100, help="of a rollout")
    parser.add_argument("--seconds", type=float, default=12.0, help="of each measurement")
    parser.add_argument("--warm-up", type=float, default=6.0, help="seconds before it, at least")
    parser.add_argument("--processes", type=int, default=2, help="that simulate the actors")
    parser.add_argument("--update-fraction", type=float, default=0.25, help="swapping at once")
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="where ledgers may lie")
    parser.add_argument("--out", type=Path, default=RESULTS / "scale.json")
    options = parser.parse_args()
    if min(options.actors) < 1 or min(options.rates) < 0:
        parser.error("--actors must be at least 1 each, --rates at least 0")
    record = environment()
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    results = []
    with tempfile.TemporaryDirectory(dir=options.dir, prefix=".bench-scale-") as name:
        for rate in options.rates:
            for actors in options.actors:
                results.append(measure(actors, rate, options, Path(name)))
                print(line(results[-1]), flush=True)
    ray.shutdown()
    arguments = {key: getattr(options, key) for key in ("tokens", "seconds", "processes")}
    record |= {"arguments": arguments, "settings": results}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"stored in {options.out}")
    asked = [each for each in results if each["asked_groups_per_second"]]
    sys.exit(not all(met(each) for each in asked))


if __name__ == "__main__":
    main()

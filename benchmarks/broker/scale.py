"""What the control plane of a run costs as the cluster grows: 8 to 1,024 simulated actors.

    headway bench scale [--actors 8 32 128 512 1024] [--rates 200 0]

Broker with admission and ledger, broadcaster, and metrics are the real ones, each a process of Ray;
actors and learner are simulated (`scale_arms`). Together the actors generate GROUPS groups at once,
or one each where they are more, and a batch has as many. For each number of actors and each rate of
groups/s that they would give by themselves (0: generation takes no time) it shows what the broker
accepted, how long calls took, the shares of a core that everybody got, memory, what the broker
would carry with a core of its own at that cost a group, and how long a scrape took.

Calls are timed in a process that has only a few of the actors, so that they do not wait for the
simulation of the others. A measurement lasts until ENOUGH puts are timed, or PATIENCE times
--seconds have passed, which is said. The figures of merit are the 99th percentiles of puts and of
leases, each at most 100 ms at 200 groups/s (`scale_verdict`). Raw numbers are stored under
benchmarks/results/ after every setting.
"""

import argparse
import contextlib
import json
import math
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import ray

from benchmarks.broker.queue_arms import GROUP_SIZE
from benchmarks.broker.scale_arms import FOREVER, Crowd, Learner
from benchmarks.broker.scale_verdict import lines, missed, quantiles, verdict
from benchmarks.harness.provenance import RESULTS, environment, reserve
from queues.config import QueuesConfig, RunSpec
from queues.ray_broker import BrokerClient, create_broker
from weight_sync.ray_broadcaster import BroadcasterClient, create_broadcaster

GROUPS = 256
WITNESSES = 8
"""Actors that are timed, at least; an eighth of all where that is more."""
ENOUGH = 1000
PATIENCE = 10
CALL_SECONDS = 120.0
SCRAPE_EVERY = 2.0


def shares(names: Sequence[str], processes: int) -> list[Sequence[str]]:
    """Who is simulated where: the witnesses first, the others in so many processes."""
    count = max(WITNESSES, len(names) // 8)
    others = names[count:]
    rest = [others[first::processes] for first in range(min(len(others), processes))]
    return [names[:count], *rest]


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
        spec=RunSpec(groups_per_batch=batch, group_size=GROUP_SIZE, steps=FOREVER),
    )
    broadcaster = create_broadcaster(options.update_fraction, actors)
    crowds = [
        Crowd.remote(
            share,
            tokens=options.tokens,
            at_once=groups_each(actors),
            seconds=generation_seconds(actors, rate),
        )
        for share in shares([f"engine-{number}" for number in range(actors)], options.processes)
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
        for handle in (*everyone, broker.handle, broadcaster.actor):
            ray.kill(handle)


def process_of(handle: Any) -> psutil.Process:
    """The process of a Ray actor."""
    found = handle.__ray_call__.remote(lambda _: os.getpid())
    return psutil.Process(ray.get(found, timeout=CALL_SECONDS))


def cpu_seconds(process: psutil.Process) -> float:
    """That it has used so far."""
    return float(sum(process.cpu_times()[:2]))


def machine_seconds() -> tuple[float, float]:
    """CPU seconds of all processes, and core-seconds that waited for a disk, so far."""
    times = psutil.cpu_times()
    waited = float(getattr(times, "iowait", 0.0))
    return float(sum(times[:8])) - times.idle - waited, waited  # beyond those: counted twice


def answered(call: Any) -> Any:
    """What an actor answers."""
    return ray.get(call.remote(), timeout=CALL_SECONDS)


def measure(actors: int, rate: float, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One setting."""
    with (
        tempfile.TemporaryDirectory(dir=folder) as directory,
        cluster_of(actors, rate, options, Path(directory)) as (broker, sync, crowds, learner),
    ):
        address = ray.get(broker.handle.serve_metrics.remote("127.0.0.1"), timeout=CALL_SECONDS)
        handles = {"broker": broker.handle, "broadcaster": sync.actor, "learner": learner}
        handles |= {f"crowd-{number}": crowd for number, crowd in enumerate(crowds)}
        processes = {name: process_of(handle) for name, handle in handles.items()}
        time.sleep(max(options.warm_up, 2 * generation_seconds(actors, rate)))
        ray.get([each.begin.remote() for each in crowds], timeout=CALL_SECONDS)
        before = moment(broker, learner, processes)
        scrapes = scrape(f"http://{address}/metrics", options.seconds, crowds[0])
        after = moment(broker, learner, processes)
        seconds = answered(crowds[0].seconds)
        of_broker = after.broker_at - before.broker_at
        of_learner = after.learner_at - before.learner_at
        of_machine = after.machine_at - before.machine_at
        rate_of_puts = (after.accepted - before.accepted) / of_broker
        cores = {name: (after.cpu[name] - before.cpu[name]) / of_machine for name in processes}
        return {
            "actors": actors,
            "asked_groups_per_second": rate or None,
            "measured_seconds": of_learner,
            "accepted_groups_per_second": rate_of_puts,
            "trained_groups_per_second": (after.groups - before.groups) / of_learner,
            "versions_per_second": (after.batches - before.batches) / of_learner,
            "refused": after.refused - before.refused,
            "enough_puts": len(seconds["put"]) >= ENOUGH,
            "seconds": {call: quantiles(values) for call, values in seconds.items()},
            "scrape": quantiles(scrapes),
            "cores": cores,
            "machine": {
                "cores": os.cpu_count(),
                "busy": (after.machine[0] - before.machine[0]) / of_machine,
                "waits_for_disk": (after.machine[1] - before.machine[1]) / of_machine,
            },
            "broker_groups_per_core_second": rate_of_puts / cores["broker"],
            "megabytes": {
                name: processes[name].memory_info().rss / 1e6 for name in ("broker", "broadcaster")
            },
        }


class Moment(NamedTuple):
    """What was counted so far, and when: a saturated broker answers late."""

    accepted: int
    refused: int
    broker_at: float
    groups: int
    batches: int
    learner_at: float
    cpu: Mapping[str, float]
    """Seconds of each process."""
    machine: tuple[float, float]
    """See `machine_seconds`."""
    machine_at: float


def moment(broker: BrokerClient, learner: Any, processes: Mapping[str, psutil.Process]) -> Moment:
    """Asks everybody."""
    status = answered(broker.handle.status)
    broker_at = time.perf_counter()
    learner_at, groups, batches = answered(learner.counts)
    return Moment(
        accepted=status.accepted,
        refused=sum(status.refused.values()),
        broker_at=broker_at,
        groups=groups,
        batches=batches,
        learner_at=learner_at,
        cpu={name: cpu_seconds(each) for name, each in processes.items()},
        machine=machine_seconds(),
        machine_at=time.perf_counter(),
    )


def scrape(url: str, seconds: float, witnesses: Any) -> list[float]:
    """Asks for metrics every so often until the measurement is over; seconds of each answer."""
    began, taken = time.perf_counter(), []
    while True:
        now = time.perf_counter()
        with urllib.request.urlopen(url, timeout=30) as answer:
            answer.read()
        taken.append(time.perf_counter() - now)
        time.sleep(min(SCRAPE_EVERY, seconds))
        passed = time.perf_counter() - began
        if passed >= PATIENCE * seconds:
            return taken
        if passed >= seconds and answered(witnesses.puts) >= ENOUGH:
            return taken


def a_number(
    kind: Callable[[str], float], rule: str, holds: Callable[[float], bool]
) -> Callable[[str], float]:
    """Reads the value of an option that has to be finite, and as `rule` says."""

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and holds(value)):
            raise argparse.ArgumentTypeError(f"{text} must be {rule}")
        return value

    return read


COUNT = a_number(int, "a whole number, at least 1", lambda value: value >= 1)
SECONDS = a_number(float, "a number above 0", lambda value: value > 0)
FROM_ZERO = a_number(float, "a number, at least 0", lambda value: value >= 0)
TOKENS = a_number(
    int, "a whole number, at least 4: three of the prompt and one sampled", lambda value: value >= 4
)
FRACTION = a_number(float, "above 0 and at most 1", lambda value: 0 < value <= 1)


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; whatever is wrong with it ends the process here, with code 2."""
    parser = argparse.ArgumentParser(
        prog="headway bench scale", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--actors", type=COUNT, nargs="+", default=[8, 32, 128, 512, 1024])
    parser.add_argument(
        "--rates", type=FROM_ZERO, nargs="+", default=[200.0, 0.0], help="groups/s; 0: all they can"
    )
    parser.add_argument("--tokens", type=TOKENS, default=100, help="of a rollout")
    parser.add_argument(
        "--seconds", type=SECONDS, default=12.0,
        help=f"of each measurement, at least; {PATIENCE} times that for {ENOUGH} puts to be timed",
    )  # fmt: skip
    parser.add_argument("--warm-up", type=FROM_ZERO, default=6.0, help="seconds before, at least")
    parser.add_argument(
        "--processes", type=COUNT, default=8, help="that simulate the actors that are not timed"
    )
    parser.add_argument("--update-fraction", type=FRACTION, default=0.25, help="swapping at once")
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="where ledgers may lie")
    parser.add_argument("--out", type=Path, default=RESULTS / "scale.json")
    options = parser.parse_args(arguments)
    if not (options.dir.is_dir() and os.access(options.dir, os.W_OK)):
        parser.error(f"argument --dir: {options.dir} must be a folder that can be written to")
    reserve(options.out)
    return options


def main() -> None:
    options = options_of()
    record = environment()
    names = ("actors", "rates", "tokens", "seconds", "warm_up", "processes", "update_fraction")
    record["arguments"] = {name: getattr(options, name) for name in names}
    results = record["settings"] = []
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory(dir=options.dir, prefix=".bench-scale-") as name:
        for rate in options.rates:
            for actors in options.actors:
                results.append(measure(actors, rate, options, Path(name)))
                print(*lines(results[-1]), sep="\n", flush=True)
                record["verdict"] = verdict(results)
                options.out.write_text(json.dumps(record, indent=1) + "\n")
    ray.shutdown()
    print(*record["verdict"], f"stored in {options.out}", sep="\n")
    sys.exit(any(missed(each) for each in results))


if __name__ == "__main__":
    main()

"""Measures what metrics and watchdog cost a run, as a share of its steps.

    headway bench metrics [--steps 24]

Trains the demo for some steps. Then, with every process still there, its figures as they were and
nothing else to do, it has all of them scraped again and again, and has the watchdog look again and
again, and takes the CPU seconds of all processes of the run, Ray's included, less what they use at
rest. The cost of a second of a run is that of a scrape over the interval of the shipped
`prometheus.yml`, that of a look over the watchdog's, and what the learner notes of each batch; its
share counts CPU seconds of all processes against the seconds of a step, as if nothing ran beside
anything. It must stay below 1 %.

The timeline and the report cost nothing while a run goes on: they are made from rows that a run
keeps anyway. Leaves out `deploy.engine_metrics`, where vLLM counts for itself.
"""

import argparse
import asyncio
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
import urllib.request
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.harness.provenance import RESULTS, environment, reserve, store
from deploy import session as session
from deploy.config.loader import load_recipe
from deploy.observability.watchdog import LOOK_SECONDS
from deploy.preflight.inputs import load_inputs
from deploy.run import Run
from deploy.runtime.console import Terminal
from deploy.storage.run_directory import RunDirectory
from learner.metrics import LearnerMetrics

REST_SECONDS = 6.0
"""How long the processes are watched doing nothing, and how long each thing is repeated."""
WARM_UP = 5
"""Steps that are left out."""
AIM = 0.01
PROMETHEUS = Path(session.__file__).parent / "monitoring" / "prometheus.yml"


class Measured(Run):
    """A run that is measured once it has trained its last batch."""

    found: dict[str, Any]

    async def train(self) -> None:
        """See `Run.train`; then measures."""
        await super().train()
        assert self.targets is not None
        extra = self.watch()
        await extra.look()  # finds the processes, which is done once
        idle = await cores(asyncio.sleep(REST_SECONDS))
        addresses = [each["targets"][0] for each in self.targets.exporter.targets()]
        Measured.found = {
            "processes": len(addresses),
            "idle_cores": idle,
            "scrape": await self.cost(lambda: asyncio.to_thread(scrape, addresses), idle),
            "look": await self.cost(extra.look, idle),
            "note_seconds": note(self.record.batches[-1]),
            "step_seconds": step_seconds(self.record.batches),
        }

    async def cost(
        self, once: Callable[[], Coroutine[Any, Any, float | None]], idle: float
    ) -> dict[str, float]:
        """CPU seconds of the run each time, without those of whoever asks."""
        times, asking, began = 0, 0.0, time.perf_counter()

        async def repeat() -> None:
            nonlocal times, asking
            while time.perf_counter() - began < REST_SECONDS:
                asking += await once() or 0.0
                times += 1

        used = await cores(repeat())
        passed = time.perf_counter() - began
        return {"times": times, "cpu_seconds": ((used - idle) * passed - asking) / times}


async def cores(work: Coroutine[Any, Any, None]) -> float:
    """CPU seconds a second of all processes of the run while something is done."""
    before, began = cpu_seconds(), time.perf_counter()
    await work
    return (cpu_seconds() - before) / (time.perf_counter() - began)


def cpu_seconds() -> float:
    """Of this process and all below it."""
    here = psutil.Process()
    total = 0.0
    for each in (here, *here.children(recursive=True)):
        try:
            total += sum(each.cpu_times()[:2])
        except psutil.Error:
            continue
    return total


def scrape(addresses: list[str]) -> float:
    """Asks every process once; CPU seconds of asking, which are Prometheus's and not the run's."""
    began = time.thread_time()
    for address in addresses:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
            answer.read()
    return time.thread_time() - began


def note(row: dict[str, Any]) -> float:
    """Seconds that the learner takes to note a batch."""
    metrics = LearnerMetrics()
    return min(timeit.repeat(lambda: metrics.observe(row), number=1000, repeat=5)) / 1000


def step_seconds(batches: list[dict[str, Any]]) -> float:
    """Median time between two batches."""
    ends = [row["published_at"] for row in batches[WARM_UP:]]
    return statistics.median(b - a for a, b in itertools.pairwise(ends))


def shares(found: dict[str, Any], interval: float) -> dict[str, float]:
    """Of the time, by what it goes to."""
    return {
        "scrapes": found["scrape"]["cpu_seconds"] / interval,
        "watchdog": found["look"]["cpu_seconds"] / LOOK_SECONDS,
        "notes": found["note_seconds"] / found["step_seconds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="headway bench metrics", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--recipe", default="demo")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--runs-dir", type=Path, help="with a warm start; else one is made")
    parser.add_argument("--out", type=Path, default=RESULTS / "metrics_cost.json")
    options = parser.parse_args()
    reserve(options.out)
    record = environment()
    interval = float(
        yaml.safe_load(PROMETHEUS.read_text())["global"]["scrape_interval"].rstrip("s")
    )
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder:
        runs = Path(folder)
        fixed = [f"deploy.runs_dir={runs}", f"steps={options.steps}", "heldout.size=8"]
        fixed += ["heldout.final_size=8", "heldout.every=100000", *options.settings]
        config = load_recipe(options.recipe, fixed)
        warm = config.warm_start.parent
        if options.runs_dir is None:
            words = [word for each in fixed for word in ("--set", each)]
            headway = Path(sys.executable).parent / "headway"
            subprocess.run([headway, "sft", options.recipe, *words], check=True, env=os.environ)
        else:
            warm.symlink_to((options.runs_dir / warm.name).absolute())
        directory = RunDirectory.of(config)
        directory.create(config, replace=False)
        session.Run = Measured
        session.run(config, load_inputs(config), directory, Terminal())
    found = Measured.found
    parts = shares(found, interval)
    total = sum(parts.values())
    print(
        f"a step takes {found['step_seconds']:.2f} s; a scrape of {found['processes']} processes "
        f"costs {1e3 * found['scrape']['cpu_seconds']:.1f} ms of CPU, every {interval:g} s; a look "
        f"of the watchdog {1e3 * found['look']['cpu_seconds']:.1f} ms, every {LOOK_SECONDS:g} s; "
        f"a batch is noted in {1e6 * found['note_seconds']:.0f} µs\n"
        + ", ".join(f"{name} {share:.3%}" for name, share in parts.items())
        + f": together {total:.3%} of a step, {AIM:.0%} allowed"
    )
    record |= {"interval_seconds": interval, **found, "shares": parts, "share": total}
    store(record, options.out)
    sys.exit(total > AIM)


if __name__ == "__main__":
    main()

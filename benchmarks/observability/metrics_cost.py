"""Cost of metrics and watchdog for a run, as a share of its steps.

    headway bench metrics [--steps 24]

Trains the demo; then, with all processes at rest, takes the CPU seconds of scrapes and of looks of
the watchdog, over their intervals, and of the learner's metrics of a batch, as if nothing ran in
parallel. Must stay below 1 %. Leaves out `deploy.engine_metrics`.
"""

import asyncio
import itertools
import os
import subprocess
import sys
import tempfile
import time
import timeit
import urllib.request
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from benchmarks.harness.study import Options, Record, Study, option
from benchmarks.harness.subprocesses import CLI, cpu_seconds, set_options
from deploy import session
from deploy.config.loader import load_recipe
from deploy.observability.watchdog import LOOK_SECONDS
from deploy.preflight.inputs import load_inputs
from deploy.run import Run
from deploy.runtime.console import Terminal
from deploy.storage.run_directory import RunDirectory
from learner.diagnostics.batch_report import TrainedBatch
from learner.metrics import LearnerMetrics

REST_SECONDS = 6.0
"""Duration of the measurement at rest, and of each repeated call."""
WARM_UP = 5
"""Steps that are left out."""
AIM = 0.01
PROMETHEUS = Path(session.__file__).parent / "monitoring" / "prometheus.yml"


class MeasuredRun(Run):
    """A run that is measured once it has trained its last batch."""

    figures: Record

    async def train(self) -> None:
        """See `Run.train`; then measures."""
        await super().train()
        assert self.exporter is not None
        batches = self.context.record.batches
        await self.watchdog.look()  # finds the processes, which is done once
        idle = await cores(asyncio.sleep(REST_SECONDS))
        addresses = [target["targets"][0] for target in self.exporter.targets()]
        MeasuredRun.figures = {
            "processes": len(addresses),
            "idle_cores": idle,
            "scrape": await cost(lambda: asyncio.to_thread(scrape, addresses), idle),
            "look": await cost(self.watchdog.look, idle),
            "note_seconds": note(batches[-1]),
            "step_seconds": step_seconds(batches),
        }


async def cost(
    call: Callable[[], Coroutine[Any, Any, float | None]], idle: float
) -> dict[str, float]:
    """Return the run's CPU seconds of a call, without those that the call returns as its own."""
    times, own, began = 0, 0.0, time.perf_counter()

    async def repeat() -> None:
        nonlocal times, own
        while time.perf_counter() - began < REST_SECONDS:
            own += await call() or 0.0
            times += 1

    used = await cores(repeat())
    passed = time.perf_counter() - began
    return {"times": times, "cpu_seconds": ((used - idle) * passed - own) / times}


async def cores(work: Coroutine[Any, Any, None]) -> float:
    """Return the CPU seconds per second of all processes of the run during some work."""
    before, began = cpu_seconds(os.getpid()), time.perf_counter()
    await work
    return (cpu_seconds(os.getpid()) - before) / (time.perf_counter() - began)


def scrape(addresses: list[str]) -> float:
    """Scrape every process once; return the CPU seconds of asking, which are Prometheus's."""
    began = time.thread_time()
    for address in addresses:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
            answer.read()
    return time.thread_time() - began


def note(batch: TrainedBatch) -> float:
    """Return the seconds of the learner's metrics of a batch."""
    metrics = LearnerMetrics()
    return min(timeit.repeat(lambda: metrics.observe(batch), number=1000, repeat=5)) / 1000


def step_seconds(batches: Sequence[TrainedBatch]) -> float:
    """Return the median time between two batches."""
    ends = [batch.times.published_at for batch in batches[WARM_UP:]]
    return median(later - earlier for earlier, later in itertools.pairwise(ends))


def shares(figures: Record, interval: float) -> dict[str, float]:
    """Return the shares of a run's time, by cause."""
    return {
        "scrapes": figures["scrape"]["cpu_seconds"] / interval,
        "watchdog": figures["look"]["cpu_seconds"] / LOOK_SECONDS,
        "notes": figures["note_seconds"] / figures["step_seconds"],
    }


def measure(options: Options) -> Iterator[Record]:
    prometheus = yaml.safe_load(PROMETHEUS.read_text())["global"]
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder:
        settings = [f"deploy.runs_dir={folder}", f"steps={options.steps}", "heldout.size=8"]
        settings += ["heldout.final_size=8", "heldout.every=100000"]
        config = load_recipe("demo", settings)
        warm_start = config.warm_start.parent
        if options.runs_dir is None:
            command = [sys.executable, *CLI, "sft", "demo", *set_options(settings)]
            subprocess.run(command, check=True, env=os.environ)
        else:
            warm_start.symlink_to((options.runs_dir / warm_start.name).absolute())
        directory = RunDirectory.of(config)
        directory.create(config, replace=False)
        vars(session)["Run"] = MeasuredRun
        session.run(config, load_inputs(config), directory, Terminal())
    interval = float(prometheus["scrape_interval"].rstrip("s"))
    yield {"interval_seconds": interval, **MeasuredRun.figures}


def conclude(record: Record) -> Record:
    parts = shares(record, record["interval_seconds"])
    return {"shares": parts, "share": sum(parts.values())}


def table(record: Record) -> str:
    parts = ", ".join(f"{name} {share:.3%}" for name, share in record["shares"].items())
    return (
        f"a step takes {record['step_seconds']:.2f} s; a scrape of {record['processes']} processes "
        f"costs {1e3 * record['scrape']['cpu_seconds']:.1f} ms of CPU, every "
        f"{record['interval_seconds']:g} s; a look of the watchdog "
        f"{1e3 * record['look']['cpu_seconds']:.1f} ms, every {LOOK_SECONDS:g} s; the metrics of a "
        f"batch {1e6 * record['note_seconds']:.0f} µs\n"
        f"{parts}: together {record['share']:.3%} of a step, {AIM:.0%} allowed"
    )


STUDY = Study(
    name="metrics",
    about=__doc__,
    options=(
        option("--steps", 24, "of the run"),
        option("--runs-dir", None, "folder with a warm start; else one is made", type=Path),
    ),
    file="metrics_cost.json",
    measure=measure,
    conclude=conclude,
    table=table,
    misses=lambda record: ["metrics and watchdog cost too much"] if record["share"] > AIM else [],
)

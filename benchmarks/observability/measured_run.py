"""A run that measures the CPU seconds of its own metrics, watchdog and pings."""

import asyncio
import itertools
import time
import timeit
import urllib.request
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from statistics import median
from typing import Any

import psutil

from benchmarks.harness.record import Record
from deploy.run import Run
from learner.diagnostics.batch_report import TrainedBatch
from learner.metrics import LearnerMetrics

REST_SECONDS = 6.0
"""Duration of the measurement at rest, and of each repeated call."""
WARM_UP = 5
"""Steps that are left out."""


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
            "ping": await cost(self.ping_all, idle),
            "note_seconds": note(batches[-1]),
            "step_seconds": step_seconds(batches),
        }

    async def ping_all(self) -> None:
        """Ping every service and every rank of the learner once."""
        await asyncio.gather(
            *(service.client.ping() for service in self.processes.services),
            *(rank.paused.remote() for rank in self.processes.learner.handles.values()),
        )


async def cost(call: Callable[[], Coroutine[Any, Any, Any]], idle: float) -> dict[str, float]:
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


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of all below it so far."""
    root, total = psutil.Process(), 0.0
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:2])
    return total


async def cores(work: Coroutine[Any, Any, None]) -> float:
    """Return the CPU seconds per second of all processes of the run during some work."""
    before, began = cpu_seconds(), time.perf_counter()
    await work
    return (cpu_seconds() - before) / (time.perf_counter() - began)


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

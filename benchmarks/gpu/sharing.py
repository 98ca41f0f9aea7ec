"""Two processes that compute on one GPU at once, time-sliced or by NVIDIA's MPS."""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.synthetic_load import synchronize

MPS = "nvidia-cuda-mps-control"
SIDES = {"cuda": 2048, "cpu": 128}
"""Sides of the square matrices that are multiplied."""
SECONDS = {"cuda": 3.0, "cpu": 0.2}
START_SECONDS = 60.0
"""Deadline of the start of processes, and of the daemon of MPS."""


def sharing(name: str, device: torch.device, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield products/s of one process, and of each of two at once, without and with MPS."""
    del name, rounds
    results = {"alone": _at_once(1, device), "two": _at_once(2, device)}
    if device.type == "cuda" and shutil.which(MPS):
        yield {way: [rate for rate, _ in pairs] for way, pairs in results.items()}
        with _mps():
            results["two_with_mps"] = _at_once(2, device)
    sums = {total for pairs in results.values() for _, total in pairs}
    rates = {way: [rate for rate, _ in pairs] for way, pairs in results.items()}
    yield rates | {"claims": {"all processes compute the same product": len(sums) == 1}}


def _at_once(count: int, device: torch.device) -> list[tuple[float, float]]:
    """Return products/s of each of some processes, and the sum of its product."""
    context = torch.multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(count), context.Queue()
    processes = [
        context.Process(target=_multiply, args=(device, barrier, results), daemon=True)
        for _ in range(count)
    ]
    for process in processes:
        process.start()
    pairs = [results.get(timeout=START_SECONDS + SECONDS[device.type]) for _ in processes]
    for process in processes:
        process.join(START_SECONDS)
    return pairs


def _multiply(device: torch.device, barrier: Any, results: Any) -> None:
    torch.manual_seed(0)
    side = SIDES[device.type]
    factor = torch.randn(side, side).to(device, torch.bfloat16)
    product = factor @ factor
    synchronize(device)
    barrier.wait(START_SECONDS)
    count, begin = 0, time.perf_counter()
    while (seconds := time.perf_counter() - begin) < SECONDS[device.type]:
        torch.mm(factor, factor, out=product)
        synchronize(device)
        count += 1
    results.put((count / seconds, float(product.float().sum())))


@contextmanager
def _mps() -> Iterator[None]:
    """Run the daemon of MPS for processes that begin in the block."""
    with tempfile.TemporaryDirectory() as folder:
        own = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        os.environ |= own  # of the process of this part, which ends after it
        daemon = subprocess.Popen([MPS, "-f"])
        try:
            until = time.monotonic() + START_SECONDS
            while not Path(folder, "control").exists():
                if time.monotonic() > until or daemon.poll() is not None:
                    raise RuntimeError(f"{MPS} -f did not start: exit code {daemon.poll()}")
                time.sleep(0.1)
            yield
        finally:
            daemon.terminate()
            daemon.wait(START_SECONDS)
            for name in own:
                del os.environ[name]

"""The learner's side of a weight update in a process of its own."""

import asyncio
import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.weights.sending import Sending
from weight_sync.adapter import A, AdapterForm, B, factor_name
from weight_sync.manifest import Manifest
from weight_sync.publish.staged_publisher import StagedPublisher

CHANGED = 0.01
"""Share of the elements that a step changes."""


class LearnerProcess:
    """A process that changes weights and publishes them."""

    def __init__(self, model: Path, folder: Path, sending: Sending) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, other = spawn.Pipe()
        arguments = (other, model, folder, sending)
        self._process = spawn.Process(target=_publish, args=arguments, daemon=True)
        self._process.start()

    async def publish(self, version: int) -> tuple[Manifest, float]:
        """Publish a version; return its manifest, when it is announced, and the call's seconds."""
        self._pipe.send(version)
        manifest, seconds = await asyncio.to_thread(self._pipe.recv)
        return Manifest.from_json(manifest), seconds

    def close(self) -> None:
        """Let the process remove what it has published, and end it."""
        self._pipe.send(None)
        self._process.join(30.0)
        self._process.kill()
        self._process.join()


def _publish(pipe: Connection, model: Path, folder: Path, sending: Sending) -> None:
    """Make a step and publish, for every version that the pipe asks for."""
    weights = load_file(model / "model.safetensors")
    adapter = None
    if sending.rank:
        weights, adapter = _factors(weights, sending.rank), AdapterForm(scale=1.0)
    announced: list[Manifest] = []
    with StagedPublisher(
        sending.open(folder),
        announced.append,
        64 * 2**20,
        codec=sending.codec,
        wire_dtype=torch.bfloat16 if sending.wire == "bfloat16" else None,
    ) as publisher:
        while (version := pipe.recv()) is not None:
            _step(weights)
            begin = time.perf_counter()
            publisher.publish(version, weights.items(), adapter)
            seconds = time.perf_counter() - begin
            publisher.flush(180.0)
            pipe.send((announced[-1].to_json(), seconds))


def _factors(weights: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """Return factors of an adapter for all projections, which change nothing yet."""
    tensors = {}
    for name, weight in weights.items():
        if name.endswith("_proj.weight"):
            rows, columns = weight.shape
            tensors[factor_name(name, A)] = 0.02 * torch.randn(rank, columns, dtype=weight.dtype)
            tensors[factor_name(name, B)] = torch.zeros(rows, rank, dtype=weight.dtype)
    return tensors


def _step(weights: dict[str, torch.Tensor]) -> None:
    """Change one element in a hundred, in place."""
    for tensor in weights.values():
        flat = tensor.view(-1)
        count = max(1, int(CHANGED * flat.numel()))
        indices = torch.randint(flat.numel(), (count,))
        flat[indices] += (0.01 * torch.randn(count)).to(flat.dtype)

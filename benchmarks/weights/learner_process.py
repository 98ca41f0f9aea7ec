"""The learner's side of a weight update in a process of its own."""

import asyncio
import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.weights.sending import Sending
from weight_sync.adapter import A, AdapterForm, B, factor_name
from weight_sync.manifest import Manifest
from weight_sync.publish.staged_publisher import StagedPublisher
from weight_sync.transports.protocol import Transport

CHANGED = 0.01
"""Share of the elements that a step changes."""
DEADLINE = 180.0
CLOSE_SECONDS = 30.0


class LearnerProcess:
    """A process that changes weights and publishes them; the next version is `version + 1`."""

    def __init__(self, model: Path, folder: Path, sending: Sending, version: int = -1) -> None:
        self._arguments = model, folder, sending
        self.version = version
        self._start()

    def _start(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, other = spawn.Pipe()
        self._process = spawn.Process(target=_publish, args=(other, *self._arguments), daemon=True)
        self._process.start()

    async def publish(self) -> Manifest:
        """Publish the next version; returns when it is announced."""
        self.version += 1
        self._pipe.send((self.version, False))
        return Manifest.from_json(await asyncio.to_thread(self._pipe.recv))

    async def seconds(self) -> float:
        """Return the seconds of the last call of `publish`, when everything is sent."""
        seconds: float = await asyncio.to_thread(self._pipe.recv)
        return seconds

    async def publish_part(self) -> None:
        """Begin the next version; returns when its first bucket is written and the second hangs."""
        self.version += 1
        self._pipe.send((self.version, True))
        await asyncio.to_thread(self._pipe.recv)

    def kill(self) -> None:
        """Kill the process and start another one."""
        self._process.kill()
        self._process.join()
        self._start()

    def close(self) -> None:
        """Let the process remove what it has published, and end it."""
        self._pipe.send(None)
        self._process.join(CLOSE_SECONDS)
        self._process.kill()
        self._process.join()


def _publish(pipe: Connection, model: Path, folder: Path, sending: Sending) -> None:
    """Make a step and publish, for every version that the pipe asks for."""
    weights = load_file(model / "model.safetensors")
    adapter = None
    if sending.rank:
        weights, adapter = _factors(weights, sending.rank), AdapterForm(scale=1.0)
    transport = sending.open(folder)
    with StagedPublisher(
        transport,
        lambda manifest: pipe.send(manifest.to_json()),
        sending.bucket_bytes,
        codec=sending.codec,  # type: ignore[arg-type]
        wire_dtype=torch.bfloat16 if sending.wire == "bfloat16" else None,
    ) as publisher:
        while (request := pipe.recv()) is not None:
            version, cut_off = request
            if cut_off:
                _hang_at_second_bucket(transport, pipe)
            _step(weights)
            begin = time.perf_counter()
            publisher.publish(version, weights.items(), adapter)
            seconds = time.perf_counter() - begin
            publisher.flush(DEADLINE)
            pipe.send(seconds)


def _hang_at_second_bucket(transport: Transport, pipe: Connection) -> None:
    write, written = transport.write, 0

    def hang(*arguments: Any) -> Any:
        nonlocal written
        written += 1
        if written == 2:
            pipe.send(None)
            time.sleep(DEADLINE)
        return write(*arguments)

    setattr(transport, "write", hang)  # noqa: B010  (a method)


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

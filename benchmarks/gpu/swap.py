"""The swap of a version under captured graphs, the claim that weight updates on GPUs rest on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.synthetic_load import SIZES, build, timed
from weight_sync.vllm.device_memory import DeviceMemory

BLOCKS, TOKENS = 3, 64
"""Feed-forward blocks of the model that are captured, and their input's rows."""


class HostMemory(DeviceMemory):
    """Staging for a trial without a GPU."""

    def allocate(self, nbytes: int) -> Tensor:
        """Return a block of host memory."""
        return torch.empty(nbytes, dtype=torch.uint8)

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Change nothing about a copy."""
        yield

    def copy(self, targets: list[Tensor], staged: list[Tensor]) -> None:
        """Copy staged tensors into the served ones."""
        torch._foreach_copy_(targets, staged)


@torch.no_grad()
def graph(name: str, device: torch.device, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield seconds of staging all weights of a model and of the copy that the pause makes.

    Some of its blocks were captured in a CUDA graph before, which is replayed after the copy. On a
    CPU they are computed anew.
    """
    size = SIZES[name]
    torch.manual_seed(0)
    with device:
        model = build(size).to(getattr(torch, size.dtype))
    served = [parameter.data for parameter in model.parameters()]
    new = [(torch.randn_like(weight) / size.hidden**0.5).cpu() for weight in served]
    columns = torch.randn(TOKENS, size.hidden, device=device).to(served[0].dtype)

    def compute() -> Tensor:
        states = columns
        for layer in model.model.layers[:BLOCKS]:
            states = states + layer.mlp(states)
        return states

    replay = _captured(compute, device)
    before = replay().clone()
    memory = (HostMemory if device.type == "cpu" else DeviceMemory)(device, shared=False)
    staged = memory.slots(served)

    def stage() -> None:
        with memory.filling():
            for slot, weight in zip(staged, new, strict=True):
                slot.copy_(weight)

    figures: dict[str, Any] = {
        "bytes": sum(weight.nbytes for weight in served),
        "staged_on": staged[0].device.type,
        "stage": timed(device, rounds, stage),
    }
    yield figures | {"copy": timed(device, rounds, lambda: memory.copy(served, staged))}
    after = replay().clone()
    same = [torch.equal(left.cpu(), right) for left, right in zip(served, new, strict=True)]
    yield {
        "claims": {
            "served weights are those staged": all(same),
            "a replay computes with them": not torch.equal(before, after),
            "it equals an eager pass bit for bit": torch.equal(after, compute()),
        }
    }


def _captured(compute: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """Return a function that replays a computation as a CUDA graph; on a CPU, itself."""
    if device.type == "cpu":
        return compute
    beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(beside):
        compute()  # libraries take their memory before the capture
    beside.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        output = compute()

    def replay() -> Tensor:
        captured.replay()
        return output

    return replay

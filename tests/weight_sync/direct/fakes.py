"""An engine that the learner writes into, and a sender that speaks to it as vLLM's do."""

from typing import Any

import torch

from weight_sync.direct.attempt import Transfer, Weights
from weight_sync.errors import LoadFailed
from weight_sync.vllm.transfer import METHODS

TRANSFER = ["start_weight_update", "update_weights", "finish_weight_update"]


class FakeEngine:
    """A `DirectEngine` that records its calls and weights; fails the next transfers on demand."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.fails = 0

    async def pause(self) -> None:
        self.events.append("pause")

    async def transfer(self, method: str, payload: dict[str, Any] | None) -> None:
        self.events.append(method)
        assert method in METHODS
        if method == "update_weights":
            if self.fails:
                self.fails -= 1
                raise LoadFailed("injected")
            self.weights = {n: t.clone() for n, t in payload["update_info"]["tensors"]}

    async def serve(self, version: int) -> None:
        self.events.append(f"serve {version}")

    async def resume(self) -> None:
        self.events.append("resume")


def update_of(weights: Weights) -> dict[str, Any]:
    """Return the payload of one call: the names as vLLM sends them, and the tensors themselves."""
    names, tensors = zip(*weights, strict=True)
    shapes = [list(tensor.shape) for tensor in tensors]
    return {"update_info": {"names": names, "shapes": shapes, "tensors": list(weights)}}


class FakeSender:
    """Speaks to one endpoint in the order of vLLM's trainer engines (a `Sender`)."""

    def __init__(self, transfer: Transfer) -> None:
        transfer("init_weight_transfer_engine", [{}])

    def send(self, weights: Weights, transfer: Transfer) -> None:
        for method in TRANSFER:
            transfer(method, [update_of(weights) if method == "update_weights" else None])

    def close(self) -> None:
        pass

"""A `TrainEngine` of torch alone, for machines without DeepSpeed.

Like the learner's own engine, it keeps master weights and gradients in float32.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from learner.engine.protocol import Forward
from learner.errors import LearnerError
from learner.model.policy import Policy

CLIP = 1.0


class PlainEngine:
    """One process, one device, AdamW."""

    rank, ranks, gathers = 0, 1, False

    def __init__(self, policy: Policy, *, learning_rate: float) -> None:
        self.steps_taken = 0
        self._policy = policy
        self._weights = [p for p in policy.parameters() if p.requires_grad]
        self._masters = [p.detach().float().clone() for p in self._weights]
        for master in self._masters:
            master.grad = torch.zeros_like(master)
        self._optimizer = torch.optim.AdamW(self._masters, lr=learning_rate, fused=True)

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self._masters[0].device

    def forward(
        self, token_ids: Tensor, position_ids: Tensor, wanted: Tensor | None = None
    ) -> Forward:
        """See `TrainEngine.forward`."""
        columns = (token_ids, position_ids) if wanted is None else (token_ids, position_ids, wanted)
        return Forward(*self._policy(*(column.to(self.device) for column in columns)))

    def backward(self, loss: Tensor) -> None:
        """See `Trainable.backward`."""
        loss.backward()
        for weight, master in zip(self._weights, self._masters, strict=True):
            if weight.grad is not None and master.grad is not None:
                master.grad.add_(weight.grad)
                weight.grad = None

    def step(self) -> float:
        """See `Trainable.step`."""
        norm = float(torch.nn.utils.clip_grad_norm_(self._masters, CLIP))
        self._optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self._weights, self._masters)
        for master in self._masters:
            if master.grad is not None:
                master.grad.zero_()
        self.steps_taken += 1
        return norm

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """See `TrainEngine.sum_over_ranks`."""
        return values

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `TrainEngine.weights`."""
        yield from self._policy.model.named_parameters()

    def save(self, folder: Path) -> None:
        """Raise `LearnerError`."""
        raise LearnerError(f"nothing is saved in {folder}: this engine is for benchmarks")

    def load(self, folder: Path) -> None:
        """Raise `LearnerError`."""
        raise LearnerError(f"nothing is loaded from {folder}: this engine is for benchmarks")

    def close(self) -> None:
        """See `Trainable.close`."""

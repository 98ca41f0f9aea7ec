"""The seam between the learner and what trains the weights.

One implementation trains for real (`deepspeed_engine`); tests of the update use a plain torch one.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from torch import Tensor


class TrainEngine(Protocol):
    """Weights, gradients and an optimizer. Calls come from one thread at a time."""

    def forward(self, token_ids: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities [N] float32 with gradient and entropies [N] float32, detached."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of a scalar, unscaled, to what `step` will use."""
        ...

    def step(self) -> float:
        """One optimizer step on the gathered gradient; its norm before clipping.

        Raises:
            TrainingDiverged: The norm is not finite; the weights must not be published.
        """
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors of the policy as in its model folder; views, not copies."""
        ...

    def save_model(self, folder: Path) -> None:
        """Writes the policy and its tokenizer as a folder that transformers loads."""
        ...

    def save_optimizer(self, folder: Path) -> None:
        """Writes what else is needed to go on training."""
        ...

    def close(self) -> None:
        """Gives back processes, ports and memory."""
        ...

"""The seam between the learner and what trains the weights.

One implementation trains for real (`deepspeed_engine`); tests of the update use a plain torch one.
With several ranks every rank has an engine, and the methods marked collective must be called by all
of them in the same order.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Forward(NamedTuple):
    """What a policy says of each token of a row."""

    logprobs: Tensor
    """[N] float32 with gradient."""
    entropies: Tensor
    """[N] float32, with gradient where the objective needs it."""
    values: Tensor | None = None
    """[N] float32 with gradient, where the policy has a value head."""


class Trainable(Protocol):
    """A module under an optimizer. Calls come from one thread at a time."""

    rank: int
    """Of this process, from 0."""
    ranks: int
    """Processes that train together."""
    steps_taken: int
    """Optimizer steps since version 0."""

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of a scalar, unscaled, to what `step` will use. Collective.

        The gradient of the step is the sum over the calls of all ranks. A loss that is not finite
        flows into it, so that `step` fails on every rank and none waits for another.
        """
        ...

    def step(self) -> float:
        """One optimizer step on the gathered gradient; its norm before clipping. Collective.

        Under Muon with ZeRO it is the norm of the orthogonalised update of the matrices, which
        DeepSpeed makes first, with the gradient of the rest.

        Raises:
            TrainingDiverged: The norm is not finite; the weights must not be published.
        """
        ...

    def save(self, folder: Path) -> None:
        """Writes the model with its tokenizer, and what else is needed to go on. Collective.

        When it returns every rank's part is there; what this rank wrote need not be synced yet.
        """
        ...

    def load(self, folder: Path) -> None:
        """Goes on from what `save` wrote: weights, optimizer and schedule. Collective.

        Raises:
            InputError: Part of it is missing or damaged; names the folder.
        """
        ...

    def close(self) -> None:
        """Gives back processes, ports and memory."""
        ...


class ValueEngine(Trainable, Protocol):
    """A critic with an optimizer of its own."""

    def values(self, token_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Values [N] float32 with gradient, of the state before each token. Collective."""
        ...


class TrainEngine(Trainable, Protocol):
    """A policy, its gradients and its optimizer."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        ...

    def forward(
        self, token_ids: Tensor, position_ids: Tensor, wanted: Tensor | None = None
    ) -> Forward:
        """What the policy says of the tokens of a row. Collective.

        Args:
            token_ids: [N] int64.
            position_ids: [N] int64.
            wanted: [N] bool, tokens whose log-probabilities and entropies will be read; those of
                others are 0, and cost less. None: all.
        """
        ...

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """The sum of a tensor over ranks, on the tensor's device. Collective."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors of the policy as in its model folder, each valid until the next.

        Views, not copies. Collective where `gathers`; then it must be read to its end.
        """
        ...

    @property
    def gathers(self) -> bool:
        """Whether no rank has all weights, so that all must take part in `weights`."""
        ...

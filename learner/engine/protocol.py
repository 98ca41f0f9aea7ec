"""The interface of the engine that holds and trains weights.

Every rank has an engine, and methods marked collective must be called by all of them in the same
order.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from learner.config.optimizer import OptimizerConfig


class Forward(NamedTuple):
    """The output of a policy for each token of a microbatch."""

    logprobs: Tensor  # [N] float32 with gradient
    entropies: Tensor  # [N] float32, with gradient where the objective needs it
    values: Tensor | None = None
    """[N] float32 with gradient, of the state before each token, where the policy has a value head.
    """
    values_after: Tensor | None = None
    """[N] float32, of the state after each token, where the objective needs it."""
    others: Tensor | None = None
    """[N, K] float32 with gradient, log-probabilities of other tokens, where asked for."""


class Trainable(Protocol):
    """A module under an optimizer. Calls come from one thread at a time."""

    rank: int
    """Number of this process, from 0."""
    ranks: int
    """Processes that train together."""
    steps_taken: int
    """Optimizer steps since version 0."""

    @property
    def learning_rate(self) -> float:
        """Learning rate of the newest step, as scheduled; of the first, before it."""

    def outputs(self, *columns: Tensor) -> tuple[Tensor, ...]:
        """Run the module, with gradient, on columns [N] of a microbatch. Collective."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a scalar, unscaled, to the one that `step` will use. Collective.

        The gradient of the step is the sum over the calls of all ranks. A loss that is not finite
        flows into it, so that `step` fails on every rank and none waits for another.
        """

    def step(self) -> float:
        """Take one optimizer step; return the gradient's norm before clipping. Collective.

        Under Muon with ZeRO it is the norm of the orthogonalised update of the matrices, with the
        gradient of the rest.

        Raises:
            TrainingDiverged: The norm is not finite; the weights must not be published.
        """

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Return the sum of a tensor over ranks, on the tensor's device. Collective."""

    def adopt(
        self, config: OptimizerConfig, total_steps: int, rates: Mapping[str, float] | None = None
    ) -> None:
        """Take further steps with another rate, schedule and clipping; the state stays.

        `total_steps` is the length of the schedule, and `rates` are learning rates of parts of the
        module, by the prefix of their parameters' names.
        """

    def capture(self) -> Callable[[Path], None]:
        """Copy the model, and everything needed to go on, to host memory. Collective.

        Most of it is copied while the next gradient is computed, and the step waits for the end.

        Returns a function that writes this rank's part of it, with the tokenizer, to a folder. It
        may be called once in any thread, before the next `capture`, while training goes on.
        """

    def load(self, folder: Path) -> None:
        """Load what ranks wrote of a `capture`: weights, optimizer and schedule. Collective.

        Raises:
            InputError: Part of it is missing or damaged; names the folder.
        """

    def close(self) -> None:
        """Release processes, ports and memory."""


class TrainEngine(Trainable, Protocol):
    """A policy, its gradients and its optimizer."""

    @property
    def device(self) -> torch.device:
        """Device it computes on."""

    def forward(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        wanted: Tensor | None = None,
        others: Tensor | None = None,
    ) -> Forward:
        """Compute log-probabilities and entropies of the tokens [N] of a microbatch. Collective.

        Where `wanted` [N] bool is false they are 0, and cost less. None: all are wanted. `others`
        [N, K] int64, only with `wanted`, are tokens that might stand in the place of each; their
        log-probabilities are computed too.
        """

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors of the policy as in its model folder, each valid until the next.

        Views, not copies, unless an adapter is merged in. Collective where `gathers`; then it must
        be read to its end.
        """

    def base_logprobs(self, token_ids: Tensor, position_ids: Tensor, wanted: Tensor) -> Tensor:
        """Compute the log-probabilities [N] of `forward` without its adapter. Collective."""

    @property
    def gathers(self) -> bool:
        """True if no rank has all weights, so that all must take part in `weights`."""

"""Sums that training a batch adds up, microbatch by microbatch, for the figures of its report."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from learner.diagnostics.engine_comparison import UnitSums
from learner.diagnostics.off_policy import OffPolicySums
from learner.losses.distillation import TeacherSums
from learner.losses.value_loss import CriticSums
from learner.sums import Sums


@dataclass(frozen=True, kw_only=True)
class PolicySums(Sums):
    """Sums over the tokens of a policy, each a scalar but for those of teachers."""

    loss: Tensor  # Σ token weights · loss: over a whole minibatch, its loss with penalties
    policy_loss: Tensor  # the same without penalties
    entropy: Tensor  # nats, over trained tokens
    trained: Tensor  # tokens that are masked in, and whose log-probabilities are finite
    masked_in: Tensor
    rejected: Tensor  # trained tokens that a correction rejects
    learned: Tensor  # tokens with a part in the loss
    reference_kl: Tensor | None  # nats, over trained tokens; None without a reference
    teachers: TeacherSums | None  # None without teachers
    counts: Mapping[str, Tensor]
    """Tokens that losses and corrections clipped, capped or rejected, by their `stats`."""


class ComparedTokens(NamedTuple):
    """Columns [N] of the tokens that diagnostics compare with their sampling; detached."""

    log_ratios: Tensor
    """Logs of current / behaviour policy, clamped; of the proximal policy where there is one."""
    trained: Tensor
    origins: Tensor
    sequence_ids: Tensor
    units: Tensor
    behavior_logprobs: Tensor

    @classmethod
    def joined(cls, parts: Iterable["ComparedTokens"]) -> "ComparedTokens":
        """Return the tokens of several microbatches as one."""
        return cls(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


@dataclass(frozen=True, kw_only=True)
class UpdateSums(Sums):
    """Sums over the tokens of all microbatches, each token once an epoch."""

    policy: PolicySums
    critic: CriticSums | None
    off_policy: OffPolicySums
    units: UnitSums

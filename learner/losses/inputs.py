"""What every policy loss is given and returns.

Index t of each tensor speaks about token t of one packed row of N tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor

from learner.errors import InputError

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to ± this before `exp`; the clamp stops the gradient outside."""


@dataclass(frozen=True)
class LossInputs:
    """One packed row."""

    logprobs: Tensor  # [N] floating, with gradient: the current policy
    behavior_logprobs: Tensor  # [N]: what the engine recorded when it sampled
    advantages: Tensor  # [N]
    mask: Tensor  # [N] bool: the tokens that train
    sequence_ids: Tensor  # [N] integers
    proximal_logprobs: Tensor | None = None  # [N]: the weights at the start of the batch
    reference_logprobs: Tensor | None = None  # [N]
    versions: Tensor | None = None  # [N] integers, −1 where not sampled
    group_ids: Tensor | None = None  # [N] integers

    def __post_init__(self) -> None:
        shape = self.logprobs.shape
        for item in fields(self):
            value = getattr(self, item.name)
            if value is not None and (value.ndim != 1 or value.shape != shape):
                raise InputError(
                    f"{item.name} must be [N] like logprobs {tuple(shape)}, "
                    f"found {tuple(value.shape)}"
                )

    @cached_property
    def trained(self) -> Tensor:
        """[N] bool: masked in, and every log-probability that the ratio needs is finite.

        Not finite means that the sampler drew a token which the other policy excludes.
        """
        finite = torch.isfinite(self.logprobs) & torch.isfinite(self.behavior_logprobs)
        if self.proximal_logprobs is not None:
            finite &= torch.isfinite(self.proximal_logprobs)
        return self.mask & finite

    @cached_property
    def current(self) -> Tensor:
        """[N] `logprobs` with gradient, at least float32, 0 where not `trained`."""
        return self._where_trained(self.logprobs)

    @cached_property
    def log_ratio(self) -> Tensor:
        """[N] log of current / anchor, with gradient: the anchor is proximal, else behaviour."""
        anchor = self.proximal_logprobs
        return self._clamped(self.logprobs, self.behavior_logprobs if anchor is None else anchor)

    @cached_property
    def behavior_log_ratio(self) -> Tensor:
        """[N] log of proximal / behaviour, detached; the detached current where no proximal."""
        proximal = self.logprobs if self.proximal_logprobs is None else self.proximal_logprobs
        return self._clamped(proximal, self.behavior_logprobs).detach()

    def _clamped(self, above: Tensor, below: Tensor) -> Tensor:
        difference = self._where_trained(above) - self._where_trained(below)
        return difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)

    def _where_trained(self, values: Tensor) -> Tensor:
        # Masked before any exp: 0 · inf is nan, in the gradient too.
        wide = values if values.dtype == torch.float64 else values.float()
        return torch.where(self.trained, wide, 0.0)


@dataclass(frozen=True)
class TokenLoss:
    """A loss per token, before any reduction."""

    per_token: Tensor
    """[N], minimised; 0 where a token does not train."""
    stats: Mapping[str, Tensor]
    """Counts of tokens, each a scalar, so that they add up over micro-batches and ranks."""

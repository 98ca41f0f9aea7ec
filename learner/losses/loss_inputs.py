"""Input and output of every policy loss.

Index t of each tensor belongs to token t of one microbatch of N packed tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from headway.errors import InputError
from learner.advantages.grouped import check_shapes

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to ± this before `exp`; the clamp stops the gradient outside."""


def bounded(log_ratios: Tensor) -> Tensor:
    """Clamp to ± `LOG_RATIO_BOUND`, as every log-ratio is before `exp`."""
    return log_ratios.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def check_bounds(what: str, low: float, high: float) -> None:
    """Raise InputError if absolute bounds of a ratio are out of order."""
    if not 0 <= low < high:
        raise InputError(f"{what} needs 0 <= low < high, found {low} and {high}")


class Segments:
    """The tokens of a microbatch by an id they share.

    Example:
        >>> Segments(torch.tensor([7, 7, 2])).totals(torch.tensor([1.0, 2.0, 5.0])).tolist()
        [3.0, 3.0, 5.0]
    """

    def __init__(self, ids: Tensor) -> None:
        """`ids` is [N] integers, in any order."""
        values, self.index = torch.unique(ids, return_inverse=True)
        self.count = len(values)

    def sums(self, values: Tensor) -> Tensor:
        """Return the sum of `values` [N] over each segment, [segments] float64."""
        zeros = values.new_zeros(self.count, dtype=torch.float64)
        return zeros.index_add(0, self.index, values.double())

    def totals(self, values: Tensor) -> Tensor:
        """Return for each token the sum of `values` [N] over its segment, [N] float64."""
        return self.sums(values)[self.index]

    def means(self, values: Tensor, chosen: Tensor) -> Tensor:
        """Return for each token the mean of `values` over the `chosen` tokens of its segment.

        Of shape [N] float64; 0 where a segment has no chosen token.
        """
        total = self.totals(torch.where(chosen, values, 0.0))
        return total / self.totals(chosen).clamp(min=1)


@dataclass(frozen=True)
class LossInputs:
    """One microbatch.

    A ratio is current / anchor; the anchor is the proximal policy where there is one, else the
    behaviour policy. Ratios with `raw` in their name are not bounded yet, so that sums over a
    sequence are bounded afterwards. The learner computes log-probabilities and entropies where the
    mask is true; elsewhere they are 0.
    """

    logprobs: Tensor  # [N] floating, with gradient: the current policy
    behavior_logprobs: Tensor  # [N]: what the engine recorded when it sampled
    advantages: Tensor  # [N]
    mask: Tensor  # [N] bool: the tokens that train
    sequence_ids: Tensor  # [N] integers
    proximal_logprobs: Tensor | None = None  # [N]: the weights at the start of the batch
    reference_logprobs: Tensor | None = None  # [N]
    versions: Tensor | None = None  # [N] integers, −1 where not sampled
    group_ids: Tensor | None = None  # [N] integers
    version: int | None = None  # the version being trained; lag = version − versions
    rewards: Tensor | None = None  # [N]: reward of the rollout's task, without shaping
    entropies: Tensor | None = None  # [N] nats; with gradient where a regulariser asks for it

    def __post_init__(self) -> None:
        columns = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        check_shapes(columns, "[N] like logprobs", self.logprobs)

    def require(self, what: str, field: str) -> Any:
        """Return an optional field that `what` requires; raise InputError if it is None."""
        value = getattr(self, field)
        if value is None:
            raise InputError(f"{what} needs {field}, which this microbatch does not have")
        return value

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
    def referenced(self) -> Tensor:
        """[N] bool: `trained`, and the log-probability of the reference policy is finite too."""
        reference: Tensor = self.require("a comparison with the reference", "reference_logprobs")
        return self.trained & torch.isfinite(reference)

    @cached_property
    def sequences(self) -> Segments:
        """The tokens by sequence."""
        return Segments(self.sequence_ids)

    @cached_property
    def current(self) -> Tensor:
        """[N] `logprobs` with gradient, at least float32, 0 where not `trained`."""
        return self._where(self.trained, self.logprobs)

    @cached_property
    def gains(self) -> Tensor:
        """[N] `advantages`, 0 where not `trained`."""
        return torch.where(self.trained, self.advantages, 0.0)

    @cached_property
    def raw_log_ratio(self) -> Tensor:
        """[N] log of current / anchor, with gradient, not bounded."""
        anchor = self.proximal_logprobs
        return self.current - self._detached(self.behavior_logprobs if anchor is None else anchor)

    @cached_property
    def raw_full_log_ratio(self) -> Tensor:
        """[N] log of current / behaviour, with gradient, not bounded; whatever the anchor."""
        return self.current - self._detached(self.behavior_logprobs)

    @cached_property
    def raw_behavior_log_ratio(self) -> Tensor:
        """[N] log of proximal / behaviour, detached, not bounded; of current where no proximal."""
        proximal = self.logprobs if self.proximal_logprobs is None else self.proximal_logprobs
        return self._detached(proximal) - self._detached(self.behavior_logprobs)

    @cached_property
    def log_ratio(self) -> Tensor:
        """[N] `raw_log_ratio`, bounded."""
        return bounded(self.raw_log_ratio)

    @cached_property
    def behavior_log_ratio(self) -> Tensor:
        """[N] `raw_behavior_log_ratio`, bounded."""
        return bounded(self.raw_behavior_log_ratio)

    @cached_property
    def reference_log_ratio(self) -> Tensor:
        """[N] log of current / reference, with gradient, not bounded; 0 where not `referenced`."""
        here = self.referenced
        reference: Tensor = self.require("a comparison with the reference", "reference_logprobs")
        return self._where(here, self.logprobs) - self._where(here, reference.detach())

    def lags(self, what: str) -> Tensor:
        """Return the version being trained minus the one that sampled a token, [N] integers ≥ 0.

        Raises InputError, naming `what`, if `version` or `versions` is missing.
        """
        versions: Tensor = self.require(what, "versions")
        lags: Tensor = self.require(what, "version") - versions
        return lags.clamp(min=0)

    def _detached(self, values: Tensor) -> Tensor:
        return self._where(self.trained, values.detach())

    @staticmethod
    def _where(chosen: Tensor, values: Tensor) -> Tensor:
        # Masked before any exp: 0 · inf is nan, in the gradient too.
        wide = values if values.dtype == torch.float64 else values.float()
        return torch.where(chosen, wide, 0.0)


@dataclass(frozen=True)
class TokenLoss:
    """A loss per token, before any reduction."""

    per_token: Tensor  # [N], minimised; 0 where a token does not train
    stats: Mapping[str, Tensor]
    """Counts of tokens, each a scalar, so that they add up over microbatches and ranks."""


def count_outside(raw_log_ratios: Tensor, trained: Tensor) -> Tensor:
    """Count the trained tokens whose log-ratio `bounded` changes."""
    return (trained & (raw_log_ratios.detach().abs() > LOG_RATIO_BOUND)).sum()

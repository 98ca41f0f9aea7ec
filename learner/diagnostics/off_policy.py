"""The distance between the policy being trained and the one that sampled: lags, ESS, ratios, KL.

Everything is detached. `measure` computes sums and counts, which add up over microbatches and
ranks, and `figures` the reported numbers. Causes are kept apart: numerics (engine against trainer,
at one version), a KV cache kept over an update, and age.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from learner.batch.token_weights import count_values
from learner.diagnostics.batch_report import ORIGINS, OffPolicyFigures, OriginFigures
from learner.losses.kl import k3
from learner.losses.loss_inputs import LOG_RATIO_BOUND, Segments
from learner.sums import Sums

SEQUENCE_BOUND = 300.0
"""Log-ratios of whole rollouts are clamped to ± this, so that squares of their exp add up."""

_FINEST, _STEPS = 1e-5, 108
_SIZES = [_FINEST * (LOG_RATIO_BOUND / _FINEST) ** (step / _STEPS) for step in range(_STEPS + 1)]
BIN_EDGES = (*(-size for size in reversed(_SIZES)), *_SIZES)
"""Bin edges of the histogram of log-ratios: ± 1e-5 is one bin, then each bin is a seventh longer
than the one before, out to ± `LOG_RATIO_BOUND`."""


class Origin(IntEnum):
    """Kind of a rollout by the versions that sampled its tokens, whether they train or not."""

    FRESH = 0
    """All tokens by the version being trained: only engine numerics differ."""
    CROSSED = 1
    """Tokens of more than one version: an update arrived while it was generated, and the engine may
    have kept the KV cache of the old weights."""
    STALE = 2
    """All tokens by one older version."""


def origins(versions: Tensor, mask: Tensor, sequence_ids: Tensor, *, version: int) -> Tensor:
    """Return the `Origin` of the rollout that each token belongs to, [N] int64.

    `versions` [N] int64 sampled the tokens, and `mask` [N] bool is true for those that a policy
    sampled; a sequence without any is FRESH. `version` is being trained.
    """
    _, sequence = torch.unique(sequence_ids, return_inverse=True)
    counted, size = versions[mask], int(sequence.max()) + 1 if sequence.numel() else 0
    start = versions.new_full((size,), version)
    oldest = start.scatter_reduce(0, sequence[mask], counted, "amin", include_self=False)
    newest = start.scatter_reduce(0, sequence[mask], counted, "amax", include_self=False)
    origin = torch.where(
        oldest != newest,
        int(Origin.CROSSED),
        torch.where(newest == version, int(Origin.FRESH), int(Origin.STALE)),
    )
    return origin[sequence]


def group_lag_histogram(
    versions: Tensor, mask: Tensor, group_ids: Tensor, *, version: int
) -> dict[int, int]:
    """Count groups by the lag of their oldest token, ascending; the lag that admission bounds.

    Groups without a masked-in token are left out. `group_ids` is [N]; the rest as for `origins`.
    """
    _, group = torch.unique(group_ids[mask], return_inverse=True)
    lags = version - versions[mask]
    oldest = lags.new_zeros(int(group.max()) + 1 if group.numel() else 0)
    oldest.scatter_reduce_(0, group, lags, "amax", include_self=False)
    return count_values(oldest)


def effective_sample_size(log_ratios: Tensor, mask: Tensor) -> float:
    """(Σ w)² / Σ w² of w = exp(log_ratios) over masked-in tokens: between 1 and their number.

    Kish 1965. `log_ratios` [N] are logs of current / behaviour, neither truncated nor clamped, and
    `mask` is [N] bool. 0 without tokens.

    Example:
        >>> effective_sample_size(torch.zeros(4), torch.ones(4, dtype=torch.bool))
        4.0
    """
    selected = log_ratios.detach()[mask].double()
    if not selected.numel():
        return 0.0
    weights = (selected - selected.max()).exp()
    return float(weights.sum().square() / weights.square().sum())


@dataclass(frozen=True, kw_only=True)
class OffPolicySums(Sums):
    """Sums over the trained tokens of whole sequences; ρ is current / behaviour policy.

    All are float64, and scalars unless a shape is given.
    """

    ratio: Tensor  # Σ ρ
    ratio_squared: Tensor  # Σ ρ²
    sequences: Tensor  # sequences with such a token
    sequence_ratio: Tensor  # sum over sequences of the product of ρ over their tokens
    sequence_ratio_squared: Tensor
    sequence_clamped: Tensor  # sequences whose product was beyond exp(± `SEQUENCE_BOUND`)
    log_ratio_bins: Tensor  # [bins] tokens between two `BIN_EDGES` of log ρ
    tokens: Tensor  # [origins] tokens by their `Origin`
    difference: Tensor  # [origins] Σ |log ρ|
    k3: Tensor  # [origins] Σ ρ − 1 − log ρ


def measure(
    log_ratios: Tensor, mask: Tensor, token_origins: Tensor, sequence_ids: Tensor
) -> OffPolicySums:
    """Sum over masked-in tokens and their sequences, each of which is complete.

    `log_ratios` [N] are logs of current / behaviour, detached and clamped to ± `LOG_RATIO_BOUND`;
    `token_origins` [N] are those of `origins`.
    """
    selected = log_ratios.detach()[mask].double()
    ratios = selected.exp()
    products = Segments(sequence_ids[mask]).sums(selected)
    weights = products.clamp(-SEQUENCE_BOUND, SEQUENCE_BOUND).exp()
    inner, bins = selected.new_tensor(BIN_EDGES[1:-1]), len(BIN_EDGES) - 1
    by_origin = selected.new_zeros(len(Origin))
    return OffPolicySums(
        ratio=ratios.sum(),
        ratio_squared=ratios.square().sum(),
        sequences=torch.ones_like(weights).sum(),
        sequence_ratio=weights.sum(),
        sequence_ratio_squared=weights.square().sum(),
        sequence_clamped=(products.abs() > SEQUENCE_BOUND).sum(),
        log_ratio_bins=torch.bincount(torch.bucketize(selected, inner), minlength=bins),
        tokens=by_origin.index_add(0, token_origins[mask], torch.ones_like(selected)),
        difference=by_origin.index_add(0, token_origins[mask], selected.abs()),
        k3=by_origin.index_add(0, token_origins[mask], k3(selected)),
    )


def figures(sums: OffPolicySums, *, passes: int = 1) -> OffPolicyFigures:
    """Return the figures of a batch; `passes` is the number of times each token was measured."""
    tokens, rollouts = float(sums.tokens.sum()), float(sums.sequences)
    ratio, squared = float(sums.ratio), float(sums.ratio_squared)
    bins: list[float] = sums.log_ratio_bins.tolist()
    filled = [index for index, count in enumerate(bins) if count]
    of_sequences = float(sums.sequence_ratio) ** 2
    by_origin = zip(
        ORIGINS, sums.tokens.tolist(), sums.difference.tolist(), sums.k3.tolist(), strict=True
    )
    return OffPolicyFigures(
        ess=share(ratio**2, squared * tokens),
        ess_sequence=share(of_sequences, float(sums.sequence_ratio_squared) * rollouts),
        sequence_clamped=share(float(sums.sequence_clamped), rollouts),
        ratio_mean=share(ratio, tokens),
        ratio_min=math.exp(BIN_EDGES[filled[0]]) if filled else None,
        ratio_p1=quantile(bins, 0.01),
        ratio_p99=quantile(bins, 0.99),
        ratio_max=math.exp(BIN_EDGES[filled[-1] + 1]) if filled else None,
        chi2=squared / tokens - 1 if tokens else None,
        mismatch=share(float(sums.difference.sum()), tokens),
        kl=share(float(sums.k3.sum()), tokens),
        origins={
            name: OriginFigures(
                mismatch=share(difference, count),
                kl=share(kl, count),
                tokens=int(count / passes),
            )
            for name, count, difference, kl in by_origin
        },
    )


def quantile(log_ratio_bins: Sequence[float], q: float) -> float | None:
    """Return the ratio below which a share `q` of the tokens lies; None without tokens.

    Log-ratios are assumed to be even within their bin, so the error is at most a bin: a seventh
    of the log-ratio, or 1e-5.
    """
    rank = q * sum(log_ratio_bins)
    for index, count in enumerate(log_ratio_bins):
        if count and rank <= count:
            low, high = BIN_EDGES[index], BIN_EDGES[index + 1]
            return math.exp(low + (high - low) * rank / count)
        rank -= count
    return None


def share(part: float, whole: float) -> float | None:
    """Return `part` / `whole`; None if the whole is 0."""
    return part / whole if whole else None

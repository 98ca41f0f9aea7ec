"""How far the policy being trained is from the one that sampled: lags, ESS, mismatch.

Everything is detached. Per-token results come as sums and counts, which add up over micro-batches
and ranks. Two causes are kept apart: numerics (engine against trainer, at one version) and age.
"""

from enum import IntEnum

import torch
from torch import Tensor

from learner.losses.inputs import LOG_RATIO_BOUND


class Origin(IntEnum):
    """Which policy versions sampled a rollout."""

    FRESH = 0
    """All tokens by the version being trained: what differs is engine numerics."""
    CROSSED = 1
    """Tokens of more than one version: an update arrived while it was generated, and the engine may
    have kept the KV cache of the old weights."""
    STALE = 2
    """All tokens by one older version."""


def origins(versions: Tensor, mask: Tensor, sequence_ids: Tensor, *, version: int) -> Tensor:
    """The `Origin` of the rollout that each token belongs to, [N] int64.

    Args:
        versions: [N] int64, the version that sampled a token.
        mask: [N] bool, tokens to look at; a sequence without any counts as FRESH.
        sequence_ids: [N] integers.
        version: The version being trained.
    """
    _, row = torch.unique(sequence_ids, return_inverse=True)
    looked_at, size = versions[mask], int(row.max()) + 1 if row.numel() else 0
    start = versions.new_full((size,), version)
    oldest = start.scatter_reduce(0, row[mask], looked_at, "amin", include_self=False)
    newest = start.scatter_reduce(0, row[mask], looked_at, "amax", include_self=False)
    origin = torch.where(
        oldest != newest,
        int(Origin.CROSSED),
        torch.where(newest == version, int(Origin.FRESH), int(Origin.STALE)),
    )
    return origin[row]


def lag_histogram(versions: Tensor, mask: Tensor, *, version: int) -> dict[int, int]:
    """Tokens by lag = `version` − the version that sampled them, ascending, of masked-in tokens."""
    lags, counts = torch.unique(version - versions[mask], return_counts=True)
    return dict(zip(lags.tolist(), counts.tolist(), strict=True))


def effective_sample_size(log_ratios: Tensor, mask: Tensor) -> float:
    """(Σ w)² / Σ w² of w = exp(log_ratios) over masked-in tokens: between 1 and their number.

    Kish 1965. Neither truncated nor clamped. 0 without tokens.

    Args:
        log_ratios: [N] log of current / behaviour.
        mask: [N] bool.

    Example:
        >>> effective_sample_size(torch.zeros(4), torch.ones(4, dtype=torch.bool))
        4.0
    """
    selected = log_ratios.detach()[mask].double()
    if not selected.numel():
        return 0.0
    weights = (selected - selected.max()).exp()
    return float(weights.sum().square() / weights.square().sum())


def k3(log_ratios: Tensor) -> Tensor:
    """KL(behaviour ‖ current) per token from tokens of the behaviour policy: ρ − 1 − log ρ ≥ 0.

    Unbiased (Schulman 2020, "Approximating KL divergence"); `log_ratios` [N] is log of current /
    behaviour, clamped to ± 20 on input.
    """
    bounded = log_ratios.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return bounded.expm1() - bounded


def measure(log_ratios: Tensor, mask: Tensor, token_origins: Tensor) -> dict[str, Tensor]:
    """Sums over masked-in tokens from which a batch's figures follow.

    Args:
        log_ratios: [N] log of current / behaviour, detached, clamped.
        mask: [N] bool.
        token_origins: [N] as from `origins`.

    Returns:
        Scalars: `ratio`, `ratio_squared`, and for each origin `<origin>_tokens`,
        `<origin>_difference` (Σ |log ratio|) and `<origin>_k3`.
    """
    ratios = log_ratios.double().exp()[mask]
    sums = {"ratio": ratios.sum(), "ratio_squared": ratios.square().sum()}
    for origin in Origin:
        name, here = origin.name.lower(), log_ratios[mask & (token_origins == origin)]
        sums[f"{name}_tokens"] = torch.tensor(here.numel(), device=here.device)
        sums[f"{name}_difference"] = here.abs().sum()
        sums[f"{name}_k3"] = k3(here).sum()
    return sums

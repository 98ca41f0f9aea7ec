"""Makes the report of a batch from the sums that training it left."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from learner.batch.batch import TrainBatch
from learner.config.learner import LearnerConfig
from learner.diagnostics import engine_comparison
from learner.diagnostics.batch_report import BatchReport, CriticFigures
from learner.diagnostics.off_policy import (
    Origin,
    figures,
    group_lag_histogram,
    lag_histogram,
    share,
)
from learner.losses.value_loss import explained_variance


@dataclass(kw_only=True)
class StepTotals:
    """Totals over the steps of a batch so far."""

    ranks: int
    kl_coefficient: float | None
    entropy_coefficient: float | None
    """Coefficients in the loss of the batch; None without such a term."""
    grad_norms: list[float] = field(default_factory=list)
    """Before clipping, of each optimizer step of the policy."""
    critic_grad_norms: list[float] = field(default_factory=list)
    """Before clipping, of each step of a critic with an optimizer of its own."""
    learning_rate: float | None = None
    """Of the newest step of the policy's optimizer."""
    minibatches: int = 0
    """Minibatches with a token that trains, in all epochs; fewer than configured where there are
    fewer groups."""
    busiest: int = 0
    """Workload of the busiest rank, summed over the steps."""
    workload: int = 0
    """Workload of all ranks."""


def batch_report(
    batch: TrainBatch,
    totals: StepTotals,
    sums: Mapping[str, float],
    version: int,
    config: LearnerConfig,
    units: Sequence[engine_comparison.Unit],
) -> BatchReport:
    """Report on one trained batch, which has advantages, origins and units.

    `sums` are over the tokens of all microbatches of all ranks, each token once an epoch, and
    `version` is the one that was trained.
    """
    steps = len(totals.grad_norms)
    columns, minibatches = batch.tokens, max(1, totals.minibatches)
    tokens, trained = int(columns.mask.sum()), sums["trained"]
    lags = lag_histogram(columns.versions, columns.mask, version=version)
    lengths = batch.response_lengths
    rewards = batch.whole_rewards
    scored = rewards[torch.isfinite(rewards)]
    assert batch.advantages is not None
    assert batch.dropped is not None
    assert columns.origins is not None
    crossed = columns.origins == Origin.CROSSED
    return BatchReport(
        loss=sums["loss"] / minibatches,
        policy_loss=sums["policy_loss"] / minibatches,
        reward_mean=share(float(scored.sum()), len(scored)),
        reward_std=float(scored.std()) if len(scored) > 1 else None,
        groups=float(batch.groups),
        tied_groups=float(len(torch.unique(batch.group_ids[batch.tied]))),
        unscored=batch.advantages.stats["unscored"],
        truncated_rollouts=int(batch.truncated.sum()),
        dropped_rollouts=int(batch.dropped.sum()),
        tokens_trained=tokens,
        rollouts_trained=len(torch.unique(columns.sequence_ids[columns.mask])),
        multi_version_rollouts=len(torch.unique(columns.sequence_ids[crossed])),
        response_length_mean=share(int(lengths.sum()), len(lengths)),
        entropy_mean=share(sums["entropy"], trained),
        max_lag=max(lags, default=None),
        lag_mean=share(sum(lag * count for lag, count in lags.items()), tokens),
        lag_histogram=lags,
        group_lag_histogram=group_lag_histogram(
            columns.versions, columns.mask, columns.group_ids, version=version
        ),
        fractions=_fractions(sums),
        microbatches=int(sums["microbatches"]),
        pack_efficiency=share(sums["tokens"], sums["capacity"]),
        rank_imbalance=totals.busiest * totals.ranks / totals.workload if totals.workload else 1.0,
        optimizer_steps=steps,
        grad_norm=share(sum(totals.grad_norms), steps),
        learning_rate=totals.learning_rate,
        reward_parts={name: _finite_mean(part) for name, part in batch.reward_parts.items()},
        **vars(figures(sums, passes=config.epochs)),
        reference_kl=share(sums["reference_kl"], trained) if "reference_kl" in sums else None,
        critic=_critic_figures(totals, sums) if "value_loss" in sums else None,
        kl_coefficient=totals.kl_coefficient,
        entropy_coefficient=totals.entropy_coefficient,
        tokens_too_old=_too_old(batch, version, config.max_token_lag),
        engines=engine_comparison.figures(units, sums, passes=config.epochs) or None,
    )


def _finite_mean(values: torch.Tensor) -> float | None:
    known = values[torch.isfinite(values)]
    return share(float(known.sum()), len(known))


def _fractions(sums: Mapping[str, float]) -> dict[str, float | None]:
    """Return fractions of tokens by what happened to them; sums `fraction/<name>` count tokens."""
    trained, masked_in = sums["trained"], sums["masked_in"]
    counts = {
        name.removeprefix("fraction/"): count
        for name, count in sums.items()
        if name.startswith("fraction/")
    }
    return {
        "rejected": share(sums["rejected"], trained),
        "not_finite": share(masked_in - trained, masked_in),
        **{name: share(count, trained) for name, count in counts.items()},
    }


def _too_old(batch: TrainBatch, version: int, limit: int | None) -> int | None:
    """Return how many sampled tokens lag by more than the limit; None without a limit."""
    if limit is None:
        return None
    return int((version - batch.tokens.versions[batch.sampled] > limit).sum())


def _critic_figures(totals: StepTotals, sums: Mapping[str, float]) -> CriticFigures:
    norms, tokens, returns = totals.critic_grad_norms, sums["critic_tokens"], sums["critic_returns"]
    return CriticFigures(
        value_loss=sums["value_loss"] / max(1, totals.minibatches),
        explained_variance=explained_variance(sums),
        value_mean=share(returns - sums["critic_errors"], tokens),
        return_mean=share(returns, tokens),
        critic_grad_norm=share(sum(norms), len(norms)),
    )

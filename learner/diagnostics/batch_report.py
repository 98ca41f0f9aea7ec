"""What training one batch was and did, as figures for logs, metrics and the report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from learner.batch.batch import TrainBatch
from learner.diagnostics.off_policy import (
    Origin,
    figures,
    group_lag_histogram,
    lag_histogram,
    share,
)
from learner.losses.value_loss import explained_variance


@dataclass(frozen=True, kw_only=True)
class Work:
    """What training one batch came to, over all ranks."""

    sums: Mapping[str, float]
    """Sums over the tokens of all rows, each token once an epoch."""
    epochs: int
    minibatches: int
    """That were trained, of all epochs; fewer than asked for where there are fewer groups."""
    grad_norms: Sequence[float]
    """Before clipping, of each optimizer step of the policy."""
    critic_grad_norms: Sequence[float]
    """Likewise of a critic with an optimizer of its own."""
    imbalance: float
    """Workload of the busiest rank over the mean. Ranks wait for each other at every step; with
    ZeRO 2 and 3 at every row, and then it is that of the busiest rank at each row, added up."""


def statistics(batch: TrainBatch, work: Work, version: int) -> dict[str, Any]:
    """What one batch was and did, as JSON values; None where there was nothing to measure.

    Rewards are whole, with what turns earned. `loss`, `policy_loss` (the loss without penalties),
    both a mean over the minibatches that were trained, `reward_mean`, `reward_std`, `groups`,
    `tied_groups`, `unscored`, `truncated_rollouts`, `dropped_rollouts`; `tokens_trained`,
    `rollouts_trained`, `multi_version_rollouts`, `response_length_mean` (sampled tokens),
    `entropy_mean` (nats); `max_lag`, `lag_mean`, `lag_histogram` (lag as a string → tokens),
    `group_lag_histogram` (lag of the oldest token as a string → groups);
    what `offpolicyness.figures` lists (`ess`, ratios, `mismatch_*`, `kl_*`, `tokens_*`, …), of
    the proximal instead of the current policy where it is computed;
    `fractions` of tokens that the loss or correction clipped, capped or rejected, and that had a
    log-probability which is not finite; `microbatches` (rows of all ranks and steps),
    `pack_efficiency`, `rank_imbalance` (see `Work.imbalance`),
    `optimizer_steps`, and `grad_norm` (see `Trainable.step`), a mean over them. With a reference
    `reference_kl` (nats a token); with a critic `value_loss`, `explained_variance`, `value_mean`,
    `return_mean` and `critic_grad_norm`.

    Args:
        batch: The batch, with origins.
        work: What training it came to.
        version: The version being trained.
    """
    sums, steps = work.sums, len(work.grad_norms)
    row = batch.tokens
    tokens = int(row.mask.sum())
    trained = sums["trained"]
    histogram = lag_histogram(row.versions, row.mask, version=version)
    sampled = torch.bincount(row.sequence_ids[row.mask], minlength=len(batch.lengths))
    rewards = batch.whole_rewards
    scored = rewards[torch.isfinite(rewards)]
    assert row.origins is not None
    crossed = torch.unique(row.sequence_ids[row.mask & (row.origins == Origin.CROSSED)])
    advantages = batch.advantages.stats if batch.advantages is not None else {}
    dropped = int(batch.dropped.sum()) if batch.dropped is not None else 0
    return {
        "loss": sums["loss"] / work.minibatches,
        "policy_loss": sums["policy_loss"] / work.minibatches,
        "reward_mean": share(float(scored.sum()), len(scored)),
        "reward_std": float(scored.std()) if len(scored) > 1 else None,
        **advantages,
        "truncated_rollouts": int(batch.truncated.sum()),
        "dropped_rollouts": dropped,
        "tokens_trained": tokens,
        "rollouts_trained": int((sampled > 0).sum()),
        "multi_version_rollouts": len(crossed),
        "response_length_mean": share(tokens, int((sampled > 0).sum())),
        "entropy_mean": share(sums["entropy"], trained),
        "max_lag": max(histogram, default=None),
        "lag_mean": share(sum(lag * n for lag, n in histogram.items()), tokens),
        "lag_histogram": {str(lag): n for lag, n in histogram.items()},
        "group_lag_histogram": {
            str(lag): n
            for lag, n in group_lag_histogram(
                row.versions, row.mask, row.group_ids, version=version
            ).items()
        },
        **figures(sums, passes=work.epochs),
        "fractions": {
            "rejected": share(sums["rejected"], trained),
            "not_finite": share(sums["masked_in"] - trained, sums["masked_in"]),
            **{
                name.removeprefix("fraction/"): share(value, trained)
                for name, value in sums.items()
                if name.startswith("fraction/")
            },
        },
        "microbatches": int(sums["rows"]),
        "pack_efficiency": sums["row_tokens"] / sums["row_room"] if sums["row_room"] else None,
        "rank_imbalance": work.imbalance,
        "optimizer_steps": steps,
        "grad_norm": share(sum(work.grad_norms), steps),
        **_of_reference(sums),
        **_of_critic(work),
    }


def _of_reference(sums: Mapping[str, float]) -> dict[str, float | None]:
    if "reference_kl" not in sums:
        return {}
    return {"reference_kl": share(sums["reference_kl"], sums["trained"])}


def _of_critic(work: Work) -> dict[str, float | None]:
    sums, norms = work.sums, work.critic_grad_norms
    if "value_loss" not in sums:
        return {}
    tokens, returns = sums["critic_tokens"], sums["critic_returns"]
    return {
        "value_loss": sums["value_loss"] / work.minibatches,
        "explained_variance": explained_variance(sums),
        "value_mean": share(returns - sums["critic_errors"], tokens),
        "return_mean": share(returns, tokens),
        "critic_grad_norm": share(sum(norms), len(norms)),
    }

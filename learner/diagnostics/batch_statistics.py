"""The report of a batch, made from the sums that training it left."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from learner.batch.batch import TrainBatch
from learner.batch.microbatch_plan import Indices, slowest, workloads
from learner.batch.token_weights import count_values
from learner.config.learner import LearnerConfig
from learner.diagnostics import engine_comparison
from learner.diagnostics.batch_report import BatchReport, CriticFigures, GoldFigures
from learner.diagnostics.off_policy import Origin, figures, group_lag_histogram, share
from learner.diagnostics.update_sums import PolicySums, UpdateSums
from learner.losses.value_loss import CriticSums
from queues.records import GOLD


@dataclass(kw_only=True)
class StepTotals:
    """Totals over the steps of a batch so far."""

    ranks: int
    grad_norms: list[float] = field(default_factory=list)
    """Before clipping, of each optimizer step of the policy."""
    critic_grad_norms: list[float] = field(default_factory=list)
    """Before clipping, of each step of a critic with an optimizer of its own."""
    learning_rate: float | None = None
    """Rate of the newest step of the policy's optimizer."""
    minibatches: int = 0
    """Minibatches with a token that trains, in all epochs; fewer than configured where there are
    fewer groups."""
    busiest: int = 0
    """Workload of the busiest rank, summed over the steps."""
    workload: int = 0
    """Workload of all ranks."""
    microbatches: int = 0
    """Microbatches of all ranks."""
    tokens: int = 0
    """Tokens in them."""
    capacity: int = 0
    """Capacity of them in tokens; a dummy has none."""

    def add_plan(
        self, lengths: Sequence[int], plan: Sequence[Indices], *, capacity: int, together: bool
    ) -> None:
        """Count the microbatches of one step.

        `lengths` are the rollouts' and `capacity` is one microbatch's, in tokens; `together`: ranks
        wait for each other at every microbatch.
        """
        self.busiest += slowest(lengths, plan, at_microbatches=together)
        self.workload += sum(workloads(lengths, plan))
        sizes = [sum(lengths[i] for i in members) for share in plan for members in share]
        self.microbatches += len(sizes)
        self.tokens += sum(sizes)
        self.capacity += sum(max(capacity, size) for size in sizes if size)


def batch_report(
    batch: TrainBatch,
    totals: StepTotals,
    sums: UpdateSums,
    version: int,
    config: LearnerConfig,
    units: Sequence[engine_comparison.Unit],
) -> BatchReport:
    """Report on one trained batch, which has advantages, origins and units.

    `sums` are over all ranks, and `version` is the one that was trained.
    """
    steps, policy, kl = len(totals.grad_norms), sums.policy, sums.policy.reference_kl
    columns, minibatches = batch.tokens, max(1, totals.minibatches)
    tokens, trained = int(columns.mask.sum()), float(policy.trained)
    lags = count_values(version - columns.versions[columns.mask])
    lengths = batch.response_lengths
    scored = _finite(batch.whole_rewards)
    assert batch.advantages is not None
    assert batch.dropped is not None
    assert columns.origins is not None
    crossed = columns.origins == Origin.CROSSED
    return BatchReport(
        loss=float(policy.loss) / minibatches,
        policy_loss=float(policy.policy_loss) / minibatches,
        reward_mean=_mean(scored),
        reward_std=float(scored.std()) if len(scored) > 1 else None,
        groups=float(batch.groups),
        tied_groups=float(len(torch.unique(batch.group_ids[batch.tied]))),
        unscored=float(batch.advantages.unscored),
        truncated_rollouts=int(batch.truncated.sum()),
        dropped_rollouts=int(batch.dropped.sum()),
        tokens_trained=tokens,
        rollouts_trained=len(torch.unique(columns.sequence_ids[columns.mask])),
        multi_version_rollouts=len(torch.unique(columns.sequence_ids[crossed])),
        response_length_mean=share(int(lengths.sum()), len(lengths)),
        entropy_mean=share(float(policy.entropy), trained),
        max_lag=max(lags, default=None),
        lag_mean=share(sum(lag * count for lag, count in lags.items()), tokens),
        lag_histogram=lags,
        group_lag_histogram=group_lag_histogram(
            columns.versions, columns.mask, columns.group_ids, version=version
        ),
        fractions=_fractions(policy),
        microbatches=totals.microbatches,
        pack_efficiency=share(totals.tokens, totals.capacity),
        rank_imbalance=totals.busiest * totals.ranks / totals.workload if totals.workload else 1.0,
        optimizer_steps=steps,
        grad_norm=share(sum(totals.grad_norms), steps),
        learning_rate=totals.learning_rate,
        reward_parts={name: _mean(_finite(part)) for name, part in batch.reward_parts.items()},
        **vars(figures(sums.off_policy, passes=config.epochs)),
        reference_kl=None if kl is None else share(float(kl), trained),
        teacher_divergence=_by_teacher(policy, config),
        critic=None if sums.critic is None else _critic_figures(totals, sums.critic),
        tokens_too_old=_too_old(batch, version, config.max_token_lag),
        tokens_left_out=dict(batch.left_out) or None,
        gold=_gold_figures(batch),
        engines=engine_comparison.figures(units, sums.units, passes=config.epochs) or None,
    )


def _gold_figures(batch: TrainBatch) -> GoldFigures | None:
    gold = batch.reward_parts.get(GOLD)
    if gold is None:
        return None
    known, sampled = torch.isfinite(gold) & torch.isfinite(batch.task_rewards), batch.sampled
    if not known.any():
        return None
    ids, owners = batch.tokens.token_ids[sampled], batch.tokens.sequence_ids[sampled]
    neighbours = (owners[1:] == owners[:-1]) & known[owners[1:]]
    pairs = torch.stack([ids[:-1], ids[1:]], 1)[neighbours]
    of_pairs = batch.group_ids[owners[1:]][neighbours]
    rewards, agreement, distinct = [], [], []
    for group in torch.unique(batch.group_ids[known]):
        members, own = known & (batch.group_ids == group), pairs[of_pairs == group]
        both = torch.stack([batch.task_rewards[members].double(), gold[members].double()])
        rewards.append((float(both[0].mean()), float(both[1].mean())))
        if bool((both.amax(1) > both.amin(1)).all()):
            agreement.append(float(torch.corrcoef(both)[0, 1]))
        if len(own):
            distinct.append(len(torch.unique(own, dim=0)) / len(own))
    return GoldFigures(
        groups=rewards,
        agreement=agreement,
        length=float(batch.response_lengths[known].double().mean()),
        finished=1 - float(batch.truncated[known].double().mean()),
        distinct=sum(distinct) / len(distinct) if distinct else 1.0,
    )


def _finite(values: torch.Tensor) -> torch.Tensor:
    return values[torch.isfinite(values)]


def _mean(values: torch.Tensor) -> float | None:
    return share(float(values.sum()), len(values))


def _fractions(sums: PolicySums) -> dict[str, float | None]:
    """Return fractions of tokens by what happened to them."""
    trained, masked_in = float(sums.trained), float(sums.masked_in)
    return {
        "rejected": share(float(sums.rejected), trained),
        "not_finite": share(masked_in - trained, masked_in),
        **{name: share(float(count), trained) for name, count in sorted(sums.counts.items())},
    }


def _by_teacher(sums: PolicySums, config: LearnerConfig) -> dict[str, float | None] | None:
    """Return the mean divergence from each teacher by its path; None without teachers."""
    if sums.teachers is None or config.distillation is None:
        return None
    columns = zip(sums.teachers.divergence.tolist(), sums.teachers.tokens.tolist(), strict=True)
    means = (share(total, tokens) for total, tokens in columns)
    return dict(zip((one.path for one in config.distillation.teachers), means, strict=True))


def _too_old(batch: TrainBatch, version: int, limit: int | None) -> int | None:
    """Return how many sampled tokens lag by more than the limit; None without a limit."""
    if limit is None:
        return None
    return int((version - batch.tokens.versions[batch.sampled] > limit).sum())


def _critic_figures(totals: StepTotals, sums: CriticSums) -> CriticFigures:
    norms, tokens, returns = totals.critic_grad_norms, float(sums.tokens), float(sums.returns)
    return CriticFigures(
        value_loss=float(sums.loss) / max(1, totals.minibatches),
        explained_variance=sums.explained_variance,
        value_mean=share(returns - float(sums.errors), tokens),
        return_mean=share(returns, tokens),
        critic_grad_norm=share(sum(norms), len(norms)),
    )

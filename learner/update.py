"""One batch through a train engine: groups in, optimizer steps, statistics out.

    batch ─▶ proximal log-probabilities, once, where the configuration asks for them
      └─▶ epoch ─▶ minibatch ─▶ rows of this rank: forward, backward ─▶ one optimizer step

Every rank is given the whole batch and trains its rows of it; `work_plan` says which. The loop
around it, versions and publishing are `learner.learner`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from learner.advantages import compute_advantages
from learner.aggregation import token_weights
from learner.batch import MicroBatch, Sequences, TrainBatch, build_batch, split_groups
from learner.config import LearnerConfig
from learner.corrections import importance_weights
from learner.engine import TrainEngine
from learner.errors import InputError
from learner.losses import LOSSES, LossInputs, policy_loss
from learner.offpolicyness import Origin, lag_histogram, measure, origins
from learner.work_plan import Rows, plan_rows, workloads
from queues.records import RolloutGroup


@dataclass(frozen=True)
class Work:
    """What training one batch came to, over all ranks."""

    sums: Mapping[str, float]
    """Sums over the tokens of all rows, each token once an epoch."""
    epochs: int
    grad_norms: Sequence[float]
    """Before clipping, of each optimizer step."""
    imbalance: float
    """Workload of the busiest rank over the mean; ranks wait for each other at every step."""


class Updater:
    """Trains batches; keeps nothing between them but what the advantage estimator carries."""

    def __init__(self, engine: TrainEngine, config: LearnerConfig) -> None:
        """Tries the objective out, so that a wrong setting is found before anything is generated.

        Raises:
            InputError: See `check_objective`.
        """
        check_objective(config)
        self._engine = engine
        self._config = config
        self.advantage_state: dict[str, float] = {}
        """What the advantage estimator carries between batches; part of a checkpoint."""

    def update(self, groups: Sequence[RolloutGroup], version: int) -> dict[str, Any]:
        """Takes the optimizer steps of a batch. Collective: every rank is given the same batch.

        Args:
            groups: The batch.
            version: The version being trained; the steps produce `version + 1`.

        Returns:
            Statistics over all ranks, JSON-serialisable; `statistics` lists them.

        Raises:
            LearnerError: The batch cannot be trained.
            TrainingDiverged: The loss or the gradient is not finite, on any rank.
        """
        config = self._config
        batch = build_batch(
            groups,
            advantage=config.advantage,
            advantage_options=config.advantage_options,
            aggregation=config.aggregation,
            fixed_length=config.fixed_length,
            advantage_state=self.advantage_state,
        )
        if config.uses_proximal:
            batch = self._with_proximal(batch)
        sums: Counter[str] = Counter()
        grad_norms, busiest, total = [], 0, 0
        for epoch in range(config.epochs):
            for part in split_groups(
                batch.groups, config.minibatches, version=version, epoch=epoch
            ):
                minibatch = batch.minibatch(part)
                plan = self._plan(minibatch)
                loads = workloads(minibatch.lengths, plan)
                busiest, total = busiest + max(loads), total + sum(loads)
                for row in plan[self._engine.rank]:
                    sums.update(self._accumulate(minibatch.row(row), version))
                    sums.update(self._packed(minibatch, row))
                grad_norms.append(self._engine.step())
        work = Work(
            sums=self._over_ranks(sums),
            epochs=config.epochs,
            grad_norms=grad_norms,
            imbalance=busiest * self._engine.ranks / total,
        )
        return statistics(batch, work, version)

    def _plan(self, batch: Sequences) -> list[Rows]:
        return plan_rows(batch.lengths, self._engine.ranks, self._config.microbatch_tokens)

    @torch.no_grad()
    def _with_proximal(self, batch: TrainBatch) -> TrainBatch:
        """The batch with log-probabilities of the weights as they are, from all ranks."""
        proximal = torch.zeros(len(batch.tokens.token_ids))
        for row in self._plan(batch)[self._engine.rank]:
            micro = batch.row(row)
            logprobs, _ = self._engine.forward(micro.token_ids, micro.position_ids)
            if row:
                proximal[batch.positions(row)] = logprobs.float().cpu()
        proximal = self._engine.sum_over_ranks(proximal)
        return replace(batch, tokens=replace(batch.tokens, proximal_logprobs=proximal))

    def _packed(self, batch: Sequences, row: Sequence[int]) -> dict[str, float]:
        """How full a row is; a dummy takes no place."""
        tokens = sum(batch.lengths[i] for i in row)
        room = max(self._config.microbatch_tokens, tokens) if row else 0
        return {"rows": 1, "row_tokens": tokens, "row_room": room}

    def _over_ranks(self, sums: Mapping[str, float]) -> dict[str, float]:
        names = sorted(sums)
        values = torch.tensor([sums[name] for name in names], dtype=torch.float64)
        total = self._engine.sum_over_ranks(values).tolist()
        return dict(zip(names, total, strict=True))

    def _accumulate(self, micro: MicroBatch, version: int) -> dict[str, float]:
        """Forward and backward of one row; sums over its tokens."""
        config = self._config
        logprobs, entropies = self._engine.forward(micro.token_ids, micro.position_ids)
        micro = micro.to(logprobs.device)
        inputs = LossInputs(
            logprobs=logprobs,
            behavior_logprobs=micro.behavior_logprobs,
            advantages=micro.advantages,
            mask=micro.mask,
            sequence_ids=micro.sequence_ids,
            proximal_logprobs=micro.proximal_logprobs,
            versions=micro.versions,
            group_ids=micro.group_ids,
        )
        tokens = policy_loss(config.loss, inputs, **config.loss_options)
        correction = importance_weights(config.correction, inputs, **config.correction_options)
        weights = micro.token_weights * torch.where(correction.keep, correction.weights, 0.0)
        loss = (weights * tokens.per_token).sum()
        self._engine.backward(loss)
        origin = origins(micro.versions, micro.mask, micro.sequence_ids, version=version)
        return _numbers(
            {
                "loss": loss.detach(),
                "entropy": entropies[inputs.trained].sum(),
                "trained": inputs.trained.sum(),
                "rejected": (inputs.trained & ~correction.keep).sum(),
                **measure(inputs.behavior_log_ratio, inputs.trained, origin),
                **{f"fraction/{name}": value for name, value in tokens.stats.items()},
                **{f"fraction/{name}": value for name, value in correction.stats.items()},
            }
        )


def check_objective(config: LearnerConfig) -> None:
    """Computes the objective of two made-up rollouts of one group.

    Raises:
        InputError: An unknown name or option, a value that does not fit, or a loss with its own
            ratio under a correction.
    """
    if LOSSES[config.loss].owns_is and config.correction != "none" and not config.uses_proximal:
        raise InputError(
            f"loss {config.loss!r} already weighs tokens by current/behaviour; correction "
            f"{config.correction!r} would count that twice: use correction 'none', or "
            "recompute_proximal = true"
        )
    ids, mask = torch.tensor([0, 1]), torch.tensor([True, True])
    try:
        advantages = compute_advantages(
            config.advantage,
            torch.tensor([0.0, 1.0]),
            torch.tensor([0, 0]),
            lengths=torch.tensor([1, 1]),
            **config.advantage_options,
        )
        inputs = LossInputs(
            logprobs=torch.tensor([-1.0, -2.0]),
            behavior_logprobs=torch.tensor([-1.0, -2.0]),
            advantages=advantages.values,
            mask=mask,
            sequence_ids=ids,
        )
        policy_loss(config.loss, inputs, **config.loss_options)
        importance_weights(config.correction, inputs, **config.correction_options)
    except (TypeError, RuntimeError) as error:
        raise InputError(f"the objective cannot be computed: {error}") from error
    token_weights(config.aggregation, mask, ids, ids, max_length=config.fixed_length)


def corrects_off_policyness(config: LearnerConfig) -> bool:
    """Whether the objective accounts for rollouts sampled by another policy.

    As `LearnerConfig.corrects_off_policyness`, but a loss of the user's is loaded and asked.

    Raises:
        InputError: There is no such loss.
    """
    own_ratio = LOSSES[config.loss].owns_is and not config.uses_proximal
    return own_ratio or config.correction != "none"


def statistics(batch: TrainBatch, work: Work, version: int) -> dict[str, Any]:
    """What one batch was and did, as JSON values; None where there was nothing to measure.

    `loss`, `reward_mean`, `reward_std`, `groups`, `tied_groups`, `unscored`; `tokens_trained`,
    `rollouts_trained`, `multi_version_rollouts`, `response_length_mean` (sampled tokens),
    `entropy_mean` (nats); `max_lag`, `lag_mean`, `lag_histogram` (lag as a string → tokens);
    `ess` (effective sample size over tokens, as a fraction of them), and for rollouts of each
    `Origin` `mismatch_*` (mean |log current − log behaviour|), `kl_*` (k3) and `tokens_*`, all of
    the proximal instead of the current policy where it is computed;
    `fractions` of tokens that the loss or correction clipped, capped or rejected, and that had a
    log-probability which is not finite; `microbatches` (rows of all ranks and steps),
    `pack_efficiency`, `rank_imbalance` (workload of the busiest rank over the mean),
    `optimizer_steps`, and `grad_norm` (see `TrainEngine.step`), a mean over them.

    Args:
        batch: The batch.
        work: What training it came to.
        version: The version being trained.
    """
    sums, steps = work.sums, len(work.grad_norms)
    row, tokens = batch.tokens, int(batch.tokens.mask.sum())
    trained = sums["trained"]
    histogram = lag_histogram(row.versions, row.mask, version=version)
    sampled = torch.bincount(row.sequence_ids[row.mask], minlength=len(batch.lengths))
    scored = batch.rewards[batch.advantages.keep]
    origin = origins(row.versions, row.mask, row.sequence_ids, version=version)
    crossed = torch.unique(row.sequence_ids[row.mask & (origin == Origin.CROSSED)])
    return {
        "loss": sums["loss"] / steps,
        "reward_mean": _ratio(float(scored.sum()), len(scored)),
        "reward_std": float(scored.std()) if len(scored) > 1 else None,
        **batch.advantages.stats,
        "tokens_trained": tokens,
        "rollouts_trained": int((sampled > 0).sum()),
        "multi_version_rollouts": len(crossed),
        "response_length_mean": _ratio(tokens, int((sampled > 0).sum())),
        "entropy_mean": _ratio(sums["entropy"], trained),
        "max_lag": max(histogram, default=None),
        "lag_mean": _ratio(sum(lag * n for lag, n in histogram.items()), tokens),
        "lag_histogram": {str(lag): n for lag, n in histogram.items()},
        "ess": _ratio(sums["ratio"] ** 2, sums["ratio_squared"] * trained),
        **_by_origin(sums, work.epochs),
        "fractions": {
            "rejected": _ratio(sums["rejected"], trained),
            "not_finite": _ratio(tokens - trained / work.epochs, tokens),
            **{
                name.removeprefix("fraction/"): _ratio(value, trained)
                for name, value in sums.items()
                if name.startswith("fraction/")
            },
        },
        "microbatches": int(sums["rows"]),
        "pack_efficiency": sums["row_tokens"] / sums["row_room"],
        "rank_imbalance": work.imbalance,
        "optimizer_steps": steps,
        "grad_norm": sum(work.grad_norms) / steps,
    }


def _by_origin(sums: Mapping[str, float], epochs: int) -> dict[str, float | None]:
    figures: dict[str, float | None] = {}
    for name in (origin.name.lower() for origin in Origin):
        count = sums[f"{name}_tokens"]
        figures[f"mismatch_{name}"] = _ratio(sums[f"{name}_difference"], count)
        figures[f"kl_{name}"] = _ratio(sums[f"{name}_k3"], count)
        figures[f"tokens_{name}"] = int(count / epochs)
    return figures


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _numbers(scalars: Mapping[str, Tensor]) -> dict[str, float]:
    """Scalars as numbers, with one transfer from the device."""
    values = torch.stack([value.detach().double() for value in scalars.values()]).tolist()
    return dict(zip(scalars, values, strict=True))

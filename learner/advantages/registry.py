"""Registration of advantage estimators, their lookup by name, and their run on a batch.

An estimator maps the rewards of complete groups to one number per rollout or token, once per batch
and outside autograd. All sums are float64; `compute_advantages` returns float32.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from learner.advantages.advantage_inputs import AdvantageInputs
from learner.advantages.grouped import GroupedRewards
from learner.config.traits import ADVANTAGE_NEEDS, ADVANTAGE_TRAITS, AdvantageTraits
from learner.errors import InputError
from learner.registry import Registry, options_of, refuse_unknown_options


@dataclass(frozen=True)
class Estimate:
    """The result of an estimator that returns more than one number per rollout."""

    values: Tensor
    """[R], or [N] where `token_level`."""
    token_level: bool = False
    keep: Tensor | None = None
    """[R] bool; false where the rollout must not train. None: all may."""
    returns: Tensor | None = None
    """[N], the targets of the critic."""


@dataclass(frozen=True)
class Advantages:
    """Advantages of a batch of R rollouts."""

    values: Tensor
    """[R], or [N] where `token_level`; float32, 0 where `keep` is false."""
    keep: Tensor
    """[R] bool; false where the rollout must not train: its reward is not finite, or the estimator
    selects others."""
    stats: Mapping[str, float]
    """`groups`, `tied_groups` (all rewards equal, so no signal), `unscored` rollouts."""
    returns: Tensor | None = None
    """[N] float32, the targets of a critic; None without one."""
    token_level: bool = False
    """Whether `values` are per token."""

    def on_tokens(self, sequence_ids: Tensor) -> Tensor:
        """Return the advantage of each token, [N]; `sequence_ids` [N] index the rollouts."""
        return self.values if self.token_level else self.values[sequence_ids]


@dataclass(frozen=True)
class Estimator:
    """A registered advantage estimator."""

    name: str
    function: Callable[..., Tensor | Estimate]
    traits: AdvantageTraits

    def __call__(self, batch: GroupedRewards, **options: Any) -> Tensor | Estimate:
        """Return the advantages of `batch`, float64."""
        return self.function(batch, **options)


ESTIMATORS = Registry("advantage", Estimator)


def built_in_advantage(name: str) -> Callable[[Callable[..., Tensor | Estimate]], Estimator]:
    """Register an estimator with its traits from `ADVANTAGE_TRAITS`."""
    return _decorator(name, ADVANTAGE_TRAITS[name])


def advantage(
    name: str,
    *,
    needs: Iterable[str] = (),
    relative: bool = False,
    takes_token_rewards: bool = False,
) -> Callable[[Callable[..., Tensor | Estimate]], Estimator]:
    """Register `(batch: GroupedRewards, *, options) -> Tensor [R]` as an advantage estimator.

    It may return an `Estimate` instead. The keywords are described in `AdvantageTraits`.

    Example:
        >>> @advantage("raw")
        ... def raw(batch):
        ...     return batch.rewards
    """
    unknown = sorted({*needs} - ADVANTAGE_NEEDS)
    if unknown:
        raise InputError(
            f"advantage {name!r} cannot need {', '.join(unknown)}: "
            f"only {', '.join(sorted(ADVANTAGE_NEEDS))} can be asked for"
        )
    traits = AdvantageTraits(
        needs=frozenset(needs), relative=relative, takes_token_rewards=takes_token_rewards
    )
    return _decorator(name, traits)


def _decorator(
    name: str, traits: AdvantageTraits
) -> Callable[[Callable[..., Tensor | Estimate]], Estimator]:
    return ESTIMATORS.decorator(name, make=lambda function: Estimator(name, function, traits))


@torch.no_grad()
def compute_advantages(
    name: str,
    rewards: Tensor,
    group_ids: Tensor,
    *,
    lengths: Tensor | None = None,
    state: dict[str, float] | None = None,
    baseline_rewards: Tensor | None = None,
    reward_parts: Mapping[str, Tensor] | None = None,
    mask: Tensor | None = None,
    sequence_ids: Tensor | None = None,
    token_rewards: Tensor | None = None,
    values: Tensor | None = None,
    truncated: Tensor | None = None,
    **options: Any,
) -> Advantages:
    """Compute the advantages of R rollouts by a named estimator.

    `token_rewards` are summed over a rollout and added to its reward before any baseline, except
    for estimators per token, which take the sum of later rewards; the final reward is then that of
    the last masked-in token.

    Args:
        name: reinforce, rloo, grpo, dr_grpo, batch_norm, reinforce_pp, reinforce_pp_baseline,
            remax, opo, gdpo, maxrl, pass_at_k, gae, best_of_n, best_worst, or "module:function" of
            a decorated function.
        rewards: [R] floating; a rollout whose reward is not finite neither trains nor enters a
            baseline.
        group_ids: [R] integers; rollouts of one prompt share one. Groups must be complete.
        lengths: [R] sampled tokens, for estimators that weigh by length.
        state: State that the estimator carries between batches; changed in place.
        baseline_rewards: [R] reward of a greedy rollout of the same prompt.
        reward_parts: By name, [R] each; not finite where a rollout has no such part.
        mask: [N] bool, tokens that the policy sampled, of the whole batch, packed.
        sequence_ids: [N] integers, the index 0..R−1 of each token's rollout.
        token_rewards: [N] on top of `rewards` (of steps, −β·k1); those masked out do not count.
        values: [N], the critic's value of the state before token t.
        truncated: [R] bool, rollouts that were cut off.
        **options: The estimator's own.

    Raises:
        InputError: An unknown name or option, shapes that differ, a group too small, or something
            missing that the estimator needs.
        TrainingDiverged: A value of the critic is not finite.
    """
    estimator = ESTIMATORS[name]
    refuse_unknown_options(f"advantage {name!r}", options, options_of(estimator.function))
    inputs = AdvantageInputs(
        rewards=rewards,
        group_ids=group_ids,
        lengths=lengths,
        baseline_rewards=baseline_rewards,
        reward_parts=reward_parts or {},
        truncated=truncated,
        mask=mask,
        sequence_ids=sequence_ids,
        token_rewards=token_rewards,
        values=values,
    )
    missing = [need for need in sorted(estimator.traits.needs) if not inputs.has(need)]
    if missing:
        raise InputError(f"advantage {name!r} needs {', '.join(missing)}, which was not given")
    scored = inputs.scored(estimator.traits.needs)
    batch = inputs.batch(scored, state={} if state is None else state)
    whole = batch if estimator.traits.takes_token_rewards else batch.with_token_rewards()
    result = estimator(whole, **options)
    estimate = result if isinstance(result, Estimate) else Estimate(result)
    keep = scored if estimate.keep is None else scored.masked_scatter(scored, estimate.keep)
    scatter = partial(_scattered, name, scored, keep, sequence_ids)
    return Advantages(
        values=scatter(estimate.values, token_level=estimate.token_level),
        keep=keep,
        stats={
            "groups": float(len(torch.unique(batch.groups))),
            "tied_groups": float(len(torch.unique(batch.groups[batch.tied]))),
            "unscored": float(len(rewards) - len(batch.groups)),
        },
        returns=None if estimate.returns is None else scatter(estimate.returns, token_level=True),
        token_level=estimate.token_level,
    )


def _scattered(
    name: str,
    scored: Tensor,
    keep: Tensor,
    sequence_ids: Tensor | None,
    values: Tensor,
    *,
    token_level: bool,
) -> Tensor:
    """Scatter values of the `scored` rollouts over all; 0 where not `keep`; float32."""
    if token_level:
        ids = scored.new_zeros(0, dtype=torch.int64) if sequence_ids is None else sequence_ids
        scored, keep = scored[ids], keep[ids]
    if values.shape != (int(scored.sum()),):
        raise InputError(
            f"advantage {name!r} must return {int(scored.sum())} numbers, one for each "
            f"{'token' if token_level else 'rollout'} that has a reward, found "
            f"{tuple(values.shape)}"
        )
    scattered = values.new_zeros(len(scored), dtype=torch.float32)
    scattered[scored] = values.float()
    return torch.where(keep, scattered, 0.0)

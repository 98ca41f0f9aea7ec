"""Registration of advantage estimators, their lookup by name, and their run on a batch.

An estimator maps the rewards of complete groups to one number per rollout or token, once per batch
and outside autograd. All sums are float64; `compute_advantages` returns float32.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headway.errors import InputError
from headway.options import check_options
from headway.registry import Entry
from learner.advantages.grouped import COLUMNS, GroupedRewards, RolloutTokens
from learner.config.traits import ADVANTAGE_NEEDS, ESTIMATORS, AdvantageTraits
from learner.errors import TrainingDiverged

SETTING = "learner.advantage_options"


@dataclass(frozen=True)
class Estimate:
    """The result of an estimator that returns more than one number per rollout."""

    values: Tensor  # [R], or [N] where `token_level`
    token_level: bool = False
    keep: Tensor | None = None  # [R] bool; false where the rollout must not train. None: all may
    returns: Tensor | None = None  # [N], the targets of the critic


@dataclass(frozen=True)
class Advantages:
    """Advantages of a batch of R rollouts."""

    values: Tensor  # [R], or [N] where `token_level`; float32, 0 where `keep` is false
    keep: Tensor
    """[R] bool; false where the rollout must not train: its reward is not finite, or the estimator
    selects others."""
    unscored: int
    """Rollouts whose reward, or what else the estimator needs of it, is not finite."""
    returns: Tensor | None = None  # [N] float32, the targets of a critic; None without one
    token_level: bool = False
    """True if `values` are per token."""

    def on_tokens(self, sequence_ids: Tensor) -> Tensor:
        """Return the advantage of each token, [N]; `sequence_ids` [N] index the rollouts."""
        return self.values if self.token_level else self.values[sequence_ids]


def advantage(
    name: str, **traits: Any
) -> Callable[[Callable[..., Tensor | Estimate]], Entry[AdvantageTraits]]:
    """Register `(batch: GroupedRewards, *, options) -> Tensor [R]` as an advantage estimator.

    It may return an `Estimate` instead. The keywords are the fields of `AdvantageTraits`.

    Raises:
        InputError: The name is taken, or it needs something that no batch has.

    Example:
        >>> @advantage("raw")
        ... def raw(batch):
        ...     return batch.rewards
    """
    unknown = sorted({*traits.get("needs", ())} - ADVANTAGE_NEEDS)
    if unknown:
        raise InputError(
            f"advantage {name!r} cannot need {', '.join(unknown)}: "
            f"only {', '.join(sorted(ADVANTAGE_NEEDS))} can be asked for"
        )
    return ESTIMATORS.register(name, **traits)


def compute_advantages(
    name: str,
    rewards: Tensor,
    group_ids: Tensor,
    *,
    lengths: Tensor | None = None,
    **options: Any,
) -> Advantages:
    """Compute the advantages of R rollouts by a named estimator.

    Args:
        name: A built-in estimator, or "module:function" of a decorated function.
        rewards: [R] floating; a rollout whose reward is not finite neither trains nor enters a
            baseline.
        group_ids: [R] integers; rollouts of one prompt share one. Groups must be complete.
        lengths: [R] integers, sampled tokens.
        **options: Further fields of `GroupedRewards` and `RolloutTokens` by name (`token_rewards`
            for the rewards of tokens), and the estimator's own options.

    Raises:
        InputError: An unknown name or option, shapes that differ, a group too small, columns of
            tokens without `mask` and `sequence_ids`, or something missing that the estimator needs.
        TrainingDiverged: A value of the critic is not finite.
    """
    columns = {key: options.pop(key) for key in COLUMNS & options.keys()}
    rollouts = GroupedRewards.of_columns(rewards, group_ids, lengths=lengths, **columns)
    return estimate_advantages(name, rollouts, **options)


@torch.no_grad()
def estimate_advantages(name: str, rollouts: GroupedRewards, **options: Any) -> Advantages:
    """Compute the advantages of R rollouts by a named estimator, as `compute_advantages` does.

    Token rewards are summed over a rollout and added to its reward before any baseline, except for
    estimators per token, which take the sum of later rewards; the final reward is then that of the
    last masked-in token. `state` of the rollouts is changed in place.
    """
    estimator, tokens = ESTIMATORS[name], rollouts.tokens
    function, needs = estimator.function, estimator.traits.needs
    check_options(function, "batch", setting=SETTING, name=name, options=options)
    missing = [need for need in sorted(needs) if not rollouts.has(need)]
    if missing:
        raise InputError(f"advantage {name!r} needs {', '.join(missing)}, which was not given")
    values = None if tokens is None else tokens.values
    if tokens is not None and values is not None and not values[tokens.mask].isfinite().all():
        raise TrainingDiverged("the critic has values that are not finite; nothing is trained")
    scored = _scored(rollouts, needs)
    batch = rollouts.of_rollouts(scored)
    if not estimator.traits.takes_token_rewards:
        batch = batch.with_token_rewards()
    result = function(batch, **options)
    estimate = result if isinstance(result, Estimate) else Estimate(result)
    keep = scored if estimate.keep is None else scored.masked_scatter(scored, estimate.keep)
    scatter = partial(_scattered, name, scored, keep, tokens)
    return Advantages(
        values=scatter(estimate.values, token_level=estimate.token_level),
        keep=keep,
        unscored=len(scored) - len(batch.groups),
        returns=None if estimate.returns is None else scatter(estimate.returns, token_level=True),
        token_level=estimate.token_level,
    )


def _scored(rollouts: GroupedRewards, needs: Collection[str]) -> Tensor:
    """Return the rollouts whose reward is finite, with all that it is made of, [R] bool.

    Of several reward parts one finite part is enough.
    """
    scored = torch.isfinite(rollouts.with_token_rewards().rewards)
    if "baseline_rewards" in needs and rollouts.baseline_rewards is not None:
        scored = scored & torch.isfinite(rollouts.baseline_rewards)
    if "reward_parts" in needs:
        scored = scored & torch.isfinite(torch.stack([*rollouts.reward_parts.values()])).any(0)
    return scored


def _scattered(
    name: str,
    scored: Tensor,
    keep: Tensor,
    tokens: RolloutTokens | None,
    values: Tensor,
    *,
    token_level: bool,
) -> Tensor:
    """Scatter values of the `scored` rollouts over all; 0 where not `keep`; float32."""
    if token_level:
        ids = scored.new_zeros(0, dtype=torch.int64) if tokens is None else tokens.sequence_ids
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

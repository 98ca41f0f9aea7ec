"""What every advantage estimator is given and returns, and how it is found by name.

An estimator maps the rewards of complete groups to one number per rollout, once per batch and
outside autograd. All sums are float64; `compute_advantages` returns float32.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from learner.errors import InputError
from learner.registry import Registry, options_of, refuse_unknown_options

TIE = 1e-8
"""Rewards this close, relative to their size, count as equal."""


@dataclass(frozen=True)
class GroupedRewards:
    """Rewards with their groups; rows whose reward is not finite are already left out.

    The rule for a group without variance (largest − smallest reward ≤ `TIE`) is applied here,
    before any division: float32 rewards of 0.3 have a standard deviation of 3e-8, not 0.
    """

    rewards: Tensor  # [R] float64
    groups: Tensor  # [R] int64 in 0..P−1
    lengths: Tensor | None  # [R] int64, sampled tokens
    state: dict[str, float] = field(default_factory=dict)
    """What the estimator carries from batch to batch; it may change it."""

    def as_one_group(self) -> "GroupedRewards":
        """The whole batch taken as a single group."""
        return GroupedRewards(self.rewards, torch.zeros_like(self.groups), self.lengths, self.state)

    def group_sum(self, values: Tensor) -> Tensor:
        """Sum of `values` [R] over each row's group, [R]."""
        return values.new_zeros(self._count).index_add(0, self.groups, values)[self.groups]

    @property
    def sizes(self) -> Tensor:
        """Rollouts in each row's group, [R] float64."""
        return self.group_sum(torch.ones_like(self.rewards))

    @property
    def tied(self) -> Tensor:
        """Where the row's group has no variance, [R] bool; true for a group of one."""
        low = self.rewards.new_zeros(self._count).scatter_reduce(
            0, self.groups, self.rewards, "amin", include_self=False
        )
        high = self.rewards.new_zeros(self._count).scatter_reduce(
            0, self.groups, self.rewards, "amax", include_self=False
        )
        scale = torch.maximum(low.abs(), high.abs()).clamp(min=1.0)
        return (high - low <= TIE * scale)[self.groups]

    @property
    def centred(self) -> Tensor:
        """Reward minus the group's mean, exactly 0 in a group without variance; [R]."""
        centred = self.rewards - self.group_sum(self.rewards) / self.sizes
        return torch.where(self.tied, 0.0, centred)

    @property
    def _count(self) -> int:
        return int(self.groups.max()) + 1 if self.groups.numel() else 0


@dataclass(frozen=True)
class Advantages:
    """Advantages of a batch of R rollouts."""

    values: Tensor
    """[R] float32; 0 where `keep` is false."""
    keep: Tensor
    """[R] bool; false where the rollout must not train because its reward is not finite."""
    stats: Mapping[str, float]
    """`groups`, `tied_groups` (all rewards equal, so no signal), `unscored` rollouts."""


@dataclass(frozen=True)
class Estimator:
    """A registered advantage estimator."""

    name: str
    function: Callable[..., Tensor]

    def __call__(self, batch: GroupedRewards, **options: Any) -> Tensor:
        """Advantages [R] float64 of `batch`."""
        return self.function(batch, **options)


ESTIMATORS = Registry("advantage", Estimator)


def advantage(name: str) -> Callable[[Callable[..., Tensor]], Estimator]:
    """Registers `(batch: GroupedRewards, *, options) -> Tensor [R]` as an advantage estimator.

    Example:
        >>> @advantage("raw")
        ... def raw(batch):
        ...     return batch.rewards
    """

    def register(function: Callable[..., Tensor]) -> Estimator:
        estimator = Estimator(name, function)
        ESTIMATORS.add(name, estimator)
        return estimator

    return register


def compute_advantages(
    name: str,
    rewards: Tensor,
    group_ids: Tensor,
    *,
    lengths: Tensor | None = None,
    state: dict[str, float] | None = None,
    **options: Any,
) -> Advantages:
    """Advantages of R rollouts by a named estimator.

    Args:
        name: reinforce, rloo, grpo, dr_grpo, or "module:function" of a decorated function.
        rewards: [R] floating; a row that is not finite neither trains nor enters a baseline.
        group_ids: [R] integers; rollouts of one prompt share one. Groups must be complete.
        lengths: [R] sampled tokens, for estimators that weigh by length.
        state: What the estimator carries between batches; changed in place.
        **options: The estimator's own.

    Raises:
        InputError: An unknown name or option, shapes that differ, or a group too small.
    """
    if rewards.ndim != 1 or rewards.shape != group_ids.shape:
        raise InputError(
            "rewards and group_ids must be [R], found "
            f"{tuple(rewards.shape)} and {tuple(group_ids.shape)}"
        )
    estimator = ESTIMATORS[name]
    refuse_unknown_options(f"advantage {name!r}", options, options_of(estimator.function))
    keep = torch.isfinite(rewards)
    _, groups = torch.unique(group_ids[keep], return_inverse=True)
    batch = GroupedRewards(
        rewards=rewards[keep].double(),
        groups=groups,
        lengths=None if lengths is None else lengths[keep],
        state={} if state is None else state,
    )
    values = torch.zeros(len(rewards), dtype=torch.float32, device=rewards.device)
    with torch.no_grad():
        values[keep] = estimator.function(batch, **options).float()
    stats = {
        "groups": float(len(groups.unique())),
        "tied_groups": float(len(groups[batch.tied].unique())),
        "unscored": float(len(rewards) - len(groups)),
    }
    return Advantages(values, keep, stats)

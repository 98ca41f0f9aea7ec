"""Arguments of `compute_advantages`, checked against each other, and the batch made of them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.advantages.grouped import GroupedRewards, RolloutTokens
from learner.errors import InputError, TrainingDiverged


@dataclass(frozen=True, kw_only=True)
class AdvantageInputs:
    """Arguments of `compute_advantages`, which describes them and the errors of their checks."""

    rewards: Tensor  # [R]
    group_ids: Tensor  # [R]
    lengths: Tensor | None  # [R]
    baseline_rewards: Tensor | None  # [R]
    reward_parts: Mapping[str, Tensor]  # [R] each
    truncated: Tensor | None  # [R]
    mask: Tensor | None  # [N]
    sequence_ids: Tensor | None  # [N]
    token_rewards: Tensor | None  # [N]
    values: Tensor | None  # [N]

    def __post_init__(self) -> None:
        if self.rewards.ndim != 1 or self.rewards.shape != self.group_ids.shape:
            raise InputError(
                "rewards and group_ids must be [R], found "
                f"{tuple(self.rewards.shape)} and {tuple(self.group_ids.shape)}"
            )
        of_rollouts = {f"reward_parts[{name!r}]": part for name, part in self.reward_parts.items()}
        for name in ("lengths", "baseline_rewards", "truncated"):
            of_rollouts[name] = getattr(self, name)
        _check_shapes(of_rollouts, "[R] like rewards", self.rewards.shape)
        of_tokens = {
            name: getattr(self, name)
            for name in ("mask", "sequence_ids", "token_rewards", "values")
            if getattr(self, name) is not None
        }
        if not of_tokens:
            return
        if self.mask is None or self.sequence_ids is None:
            raise InputError(f"{', '.join(of_tokens)} given, but tokens need mask and sequence_ids")
        _check_shapes(of_tokens, "[N] like mask", self.mask.shape)
        _check_ids(self.sequence_ids, len(self.rewards))
        if self.values is not None and not torch.isfinite(self.values[self.mask]).all():
            raise TrainingDiverged("the critic has values that are not finite; nothing is trained")

    def has(self, name: str) -> bool:
        """Return True if the optional argument `name` was given."""
        value = getattr(self, name)
        return bool(value) if isinstance(value, Mapping) else value is not None

    def scored(self, needs: Iterable[str]) -> Tensor:
        """Return the rollouts whose reward is finite, with all that it is made of, [R] bool.

        Of several reward parts one finite part is enough.
        """
        scored = torch.isfinite(self.rewards)
        if self.tokens is not None:
            scored = scored & torch.isfinite(self.tokens.sums(self.tokens.rewards, len(scored)))
        if "baseline_rewards" in needs and self.baseline_rewards is not None:
            scored = scored & torch.isfinite(self.baseline_rewards)
        if "reward_parts" in needs:
            scored = scored & torch.isfinite(torch.stack(list(self.reward_parts.values()))).any(0)
        return scored

    def batch(self, chosen: Tensor, state: dict[str, float]) -> GroupedRewards:
        """Return the input of an estimator: the rollouts where `chosen` [R] is true."""
        _, groups = torch.unique(self.group_ids[chosen], return_inverse=True)

        def take(column: Tensor | None) -> Tensor | None:
            return None if column is None else column[chosen]

        baseline, tokens = take(self.baseline_rewards), self.tokens
        return GroupedRewards(
            rewards=self.rewards[chosen].double(),
            groups=groups,
            lengths=take(self.lengths),
            state=state,
            baseline_rewards=None if baseline is None else baseline.double(),
            reward_parts={k: part[chosen].double() for k, part in self.reward_parts.items()},
            tokens=None if tokens is None else tokens.of_rollouts(chosen),
            truncated=take(self.truncated),
        )

    @property
    def tokens(self) -> RolloutTokens | None:
        """The tokens of all R rollouts."""
        if self.mask is None or self.sequence_ids is None:
            return None
        extra = torch.zeros_like(self.mask) if self.token_rewards is None else self.token_rewards
        return RolloutTokens(
            mask=self.mask,
            sequence_ids=self.sequence_ids.long(),
            rewards=torch.where(self.mask, extra.double(), 0.0),
            values=None if self.values is None else self.values.double(),
        )


def _check_shapes(columns: Mapping[str, Tensor | None], expected: str, shape: torch.Size) -> None:
    for name, column in columns.items():
        if column is not None and (column.ndim != 1 or column.shape != shape):
            raise InputError(
                f"{name} must be {expected} {tuple(shape)}, found {tuple(column.shape)}"
            )


def _check_ids(ids: Tensor, rollouts: int) -> None:
    if not ids.numel():
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= rollouts:
        raise InputError(
            f"sequence_ids must be rows 0..{rollouts - 1} of rewards, found {low}..{high}"
        )

"""From the rollout groups of one batch to minibatches and packed rows of tensors.

Advantages are computed over the whole batch and token weights over each minibatch, so that how it
is cut into rows changes nothing. No model is involved.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from learner.advantages import Advantages, compute_advantages
from learner.aggregation import token_weights
from learner.errors import LearnerError
from queues.records import Rollout, RolloutGroup


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One packed row: sequences one after the other. Index t speaks about token t."""

    token_ids: Tensor  # [N] int64
    position_ids: Tensor  # [N] int64, restart at 0 with every sequence
    sequence_ids: Tensor  # [N] int64, index of the rollout in the batch
    group_ids: Tensor  # [N] int64, index of the group in the batch
    mask: Tensor  # [N] bool, tokens that train; never the first of a sequence
    behavior_logprobs: Tensor  # [N] float32, 0 where not sampled
    versions: Tensor  # [N] int64, −1 where not sampled
    advantages: Tensor  # [N] float32
    token_weights: Tensor  # [N] float32, loss = Σ weights · per_token over the minibatch
    proximal_logprobs: Tensor | None = None  # [N] float32, where the proximal policy is computed

    def to(self, device: torch.device) -> Self:
        """The same row on another device."""
        return self._each(lambda column: column.to(device))

    def take(self, indices: Tensor) -> Self:
        """The tokens at `indices` [M]; whole sequences, in order, make a valid row."""
        return self._each(lambda column: column[indices])

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        columns = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{k: change(v) for k, v in columns.items() if v is not None})


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Some rollouts of a batch, in the order of their groups: what one optimizer step trains."""

    tokens: MicroBatch
    """All of them as a single row."""
    lengths: list[int]
    """[R] tokens of each rollout, prompt included."""

    @cached_property
    def starts(self) -> Tensor:
        """[R] where each rollout begins in `tokens`, int64."""
        lengths = torch.tensor(self.lengths)
        return lengths.cumsum(0) - lengths

    def positions(self, row: Sequence[int]) -> Tensor:
        """Where the tokens of some rollouts are in `tokens`, [M] int64."""
        starts = self.starts[list(row)].tolist()
        spans = [torch.arange(at, at + self.lengths[i]) for i, at in zip(row, starts, strict=True)]
        return torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64)

    def row(self, indices: Sequence[int]) -> MicroBatch:
        """The packed row of some rollouts; of none: a short dummy that trains nothing."""
        if indices:
            return self.tokens.take(self.positions(indices))
        dummy = self.tokens.take(torch.arange(min(2, self.lengths[0])))
        return replace(
            dummy,
            mask=torch.zeros_like(dummy.mask),
            token_weights=torch.zeros_like(dummy.token_weights),
        )


@dataclass(frozen=True, kw_only=True)
class TrainBatch(Sequences):
    """All rollouts of one batch."""

    rewards: Tensor
    """[R] float64."""
    advantages: Advantages
    """Of the R rollouts."""
    groups: int
    """Groups that the batch was built of."""
    aggregation: str
    """Mode of the token weights."""
    fixed_length: int | None
    """Their `max_length`."""

    def minibatch(self, groups: Sequence[int]) -> Sequences:
        """The rollouts of some groups (indices), with token weights of their own."""
        of_rollout = self.tokens.group_ids[self.starts]
        chosen = torch.isin(of_rollout, torch.tensor(groups)).nonzero().flatten().tolist()
        tokens = self.tokens.take(self.positions(chosen))
        return Sequences(
            tokens=_weighed(tokens, self.aggregation, self.fixed_length),
            lengths=[self.lengths[i] for i in chosen],
        )


def split_groups(groups: int, minibatches: int, *, version: int, epoch: int) -> list[list[int]]:
    """Shares whole groups out over the minibatches of one epoch, in a shuffled order.

    Args:
        groups: Number of groups of the batch.
        minibatches: Wanted parts; where there are fewer groups, each is a part.
        version: Being trained; with `epoch` it seeds the shuffle, so that training a batch again
            is the same.
        epoch: From 0.

    Returns:
        Parts of ascending indices whose sizes differ by at most one; each index once.
    """
    parts = min(minibatches, groups)
    order = list(range(groups))
    if parts > 1:
        random.Random(f"{version}/{epoch}").shuffle(order)
    return [sorted(order[part::parts]) for part in range(parts)]


def build_batch(
    groups: Sequence[RolloutGroup],
    *,
    advantage: str,
    advantage_options: Mapping[str, Any],
    aggregation: str,
    fixed_length: int | None = None,
    advantage_state: dict[str, float] | None = None,
) -> TrainBatch:
    """Tensors of a batch, with advantages and token weights.

    A rollout whose reward is not finite is masked out. Fewer rollouts than the group size are fine:
    every statistic is over what is there.

    Args:
        groups: As taken from the queue.
        advantage: Name of the estimator.
        advantage_options: Its options.
        aggregation: Mode of `token_weights`.
        fixed_length: Its `max_length`.
        advantage_state: What the estimator carries between batches; changed in place.

    Raises:
        InputError: A setting that names nothing known, or that does not fit the batch.
        LearnerError: No rollouts, or one whose first token counts as sampled: a model gives no
            probability to the first token of a sequence.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
        raise LearnerError("a batch without rollouts cannot be trained")
    _check(groups)
    lengths = [len(rollout.token_ids) for rollout in rollouts]
    group_index = torch.tensor([i for i, group in enumerate(groups) for _ in group.rollouts])
    rewards = torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float64)
    advantages = compute_advantages(
        advantage,
        rewards,
        group_index,
        lengths=torch.tensor([sum(rollout.loss_mask) for rollout in rollouts]),
        state=advantage_state,
        **advantage_options,
    )
    sequence_ids = torch.arange(len(rollouts)).repeat_interleave(torch.tensor(lengths))
    group_ids = group_index[sequence_ids]
    mask = _column(rollouts, "loss_mask", torch.bool) & advantages.keep[sequence_ids]
    tokens = MicroBatch(
        token_ids=_column(rollouts, "token_ids", torch.int64),
        position_ids=torch.cat([torch.arange(length) for length in lengths]),
        sequence_ids=sequence_ids,
        group_ids=group_ids,
        mask=mask,
        behavior_logprobs=_column(rollouts, "behavior_logprobs", torch.float32),
        versions=_column(rollouts, "versions", torch.int64),
        advantages=advantages.values[sequence_ids],
        token_weights=torch.zeros(len(mask)),
    )
    return TrainBatch(
        tokens=_weighed(tokens, aggregation, fixed_length),
        lengths=lengths,
        rewards=rewards,
        advantages=advantages,
        groups=len(groups),
        aggregation=aggregation,
        fixed_length=fixed_length,
    )


def _weighed(tokens: MicroBatch, aggregation: str, fixed_length: int | None) -> MicroBatch:
    weights = token_weights(
        aggregation, tokens.mask, tokens.sequence_ids, tokens.group_ids, max_length=fixed_length
    )
    return replace(tokens, token_weights=weights)


def _check(groups: Sequence[RolloutGroup]) -> None:
    for group in groups:
        for rollout in group.rollouts:
            if not rollout.loss_mask or rollout.loss_mask[0]:
                raise LearnerError(
                    f"group {group.group_id}, sample {rollout.sample_index}: a rollout must begin "
                    "with at least one prompt token, which is not sampled"
                )


def _column(rollouts: Sequence[Rollout], name: str, dtype: torch.dtype) -> Tensor:
    parts = [torch.as_tensor(getattr(rollout, name), dtype=dtype) for rollout in rollouts]
    return torch.cat(parts)

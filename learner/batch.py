"""From the rollout groups of one batch to packed micro-batches of tensors.

Advantages and token weights are computed here, over the whole batch, so that how it is cut into
micro-batches changes nothing. No model is involved.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor

from learner.advantages import Advantages, compute_advantages
from learner.aggregation import token_weights
from learner.errors import LearnerError
from learner.packing import pack
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
    token_weights: Tensor  # [N] float32, loss = Σ weights · per_token over the whole batch

    def to(self, device: torch.device) -> Self:
        """The same row on another device."""
        return type(self)(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})

    def take(self, indices: Tensor) -> Self:
        """The tokens at `indices` [M]; whole sequences, in order, make a valid row."""
        return type(self)(**{f.name: getattr(self, f.name)[indices] for f in fields(self)})


@dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """All rollouts of one batch, in the order of their groups."""

    tokens: MicroBatch
    """The whole batch as a single row."""
    lengths: list[int]
    """[R] tokens of each rollout, prompt included."""
    rewards: Tensor
    """[R] float64."""
    advantages: Advantages
    """Of the R rollouts."""

    def microbatches(self, capacity: int) -> Iterator[MicroBatch]:
        """Packed rows of at most `capacity` tokens; a longer sequence has one of its own."""
        starts = [0]
        for length in self.lengths:
            starts.append(starts[-1] + length)
        for row in pack(self.lengths, capacity):
            spans = [torch.arange(starts[i], starts[i + 1]) for i in row]
            yield self.tokens.take(torch.cat(spans))


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
        token_weights=token_weights(
            aggregation, mask, sequence_ids, group_ids, max_length=fixed_length
        ),
    )
    return TrainBatch(tokens=tokens, lengths=lengths, rewards=rewards, advantages=advantages)


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

"""From the rollout groups of one batch to minibatches and microbatches of packed tensors.

    groups ─▶ read_batch ─▶ scored by models ─▶ with_advantages ─▶ minibatch ─▶ microbatches

Advantages are computed over the whole batch and token weights over each minibatch, so that how it
is cut into microbatches changes nothing. No model is involved.
"""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate
from typing import Self

import numpy as np
import torch
from torch import Tensor

from headway.errors import HeadwayError
from learner.advantages import Advantages
from learner.advantages.grouped import GroupedRewards
from learner.batch.token_weights import token_weights
from queues.records import FinishReason, Rollout, RolloutGroup
from queues.segments import paths, spans


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """Packed paths, one after the other. Index t of each column belongs to token t.

    A rollout is one path, or several where its history forks (`queues.segments`). What a path
    shares with an earlier one is context in it: not sampled, and not trained.
    """

    token_ids: Tensor  # [N] int64
    position_ids: Tensor  # [N] int64, restart at 0 with every path
    sequence_ids: Tensor  # [N] int64, index of the rollout in the batch
    group_ids: Tensor  # [N] int64, index of the group in the batch
    mask: Tensor  # [N] bool, tokens that train; never the first of a path
    behavior_logprobs: Tensor  # [N] float32, 0 where not sampled
    versions: Tensor  # [N] int64, −1 where not sampled
    rewards: Tensor  # [N] float32, of the rollout's task, without shaping
    advantages: Tensor  # [N] float32
    token_weights: Tensor  # [N] float32, loss = Σ weights · per_token over the minibatch
    proximal_logprobs: Tensor | None = None  # [N] float32, where the proximal policy is computed
    reference_logprobs: Tensor | None = None  # [N] float32, where there is a reference
    values: Tensor | None = None  # [N] float32 at the start of the batch, where there is a critic
    returns: Tensor | None = None  # [N] float32, what the critic learns
    teacher_logprobs: Tensor | None = None  # [N, T, K] float32, of T teachers where there are any
    teacher_words: Tensor | None = None  # [N, T, K] int32, what they are of; None: of the tokens
    teacher_shares: Tensor | None = None  # [N, T] float32, of each teacher in their mean
    origins: Tensor | None = None  # [N] int64, `off_policy.Origin` of the token's rollout
    units: Tensor | None = None  # [N] int64, `engine_comparison.Unit` of the token, −1: of none

    def to(self, device: torch.device) -> Self:
        """Return the same tokens on another device."""
        return self._each(lambda column: column.to(device))

    def take(self, indices: Tensor | slice) -> Self:
        """Return the tokens at `indices` [M]; they must be whole paths, in order."""
        return self._each(lambda column: column[indices])

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        columns = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{k: change(v) for k, v in columns.items() if v is not None})


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Rollouts of a batch that one optimizer step trains, in the order of their groups.

    P is the number of their paths, which models compute each for itself.
    """

    tokens: Microbatch
    """All of them, packed."""
    lengths: list[int]
    """[P] tokens of each path, its context included."""

    @cached_property
    def starts(self) -> Tensor:
        """[P] where each path begins in `tokens`, int64."""
        lengths = torch.tensor(self.lengths)
        return lengths.cumsum(0) - lengths

    def positions(self, members: Sequence[int]) -> Tensor:
        """Return the indices in `tokens` of the tokens of some paths, [M] int64."""
        starts = self.starts[list(members)].tolist()
        spans = [
            torch.arange(start, start + self.lengths[i])
            for i, start in zip(members, starts, strict=True)
        ]
        return torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64)

    @cached_property
    def trainable(self) -> list[int]:
        """The paths with a token that trains; no microbatch needs the others."""
        trained: list[int] = torch.unique(self.path_of_token[self.tokens.mask]).tolist()
        return trained

    @cached_property
    def path_of_token(self) -> Tensor:
        """[N] int64, index into `lengths`."""
        return torch.arange(len(self.lengths)).repeat_interleave(torch.tensor(self.lengths))

    @cached_property
    def rollout_of_path(self) -> list[int]:
        """[P] index of its rollout in the batch."""
        rollouts: list[int] = self.tokens.sequence_ids[self.starts].tolist()
        return rollouts

    @cached_property
    def group_of_path(self) -> list[int]:
        """[P] index of its group in the batch."""
        groups: list[int] = self.tokens.group_ids[self.starts].tolist()
        return groups

    def microbatches(self, plan: Sequence[Sequence[int]], device: torch.device) -> list[Microbatch]:
        """Return several microbatches; their tokens go to the device together.

        One without members is a short dummy that trains nothing.
        """
        everyone = [i for members in plan for i in members]
        tokens = self.tokens.take(self.positions(everyone)).to(device)
        first = self.tokens.take(slice(min(2, self.lengths[0]))).to(device)
        dummy = replace(
            first,
            mask=torch.zeros_like(first.mask),
            token_weights=torch.zeros_like(first.token_weights),
        )
        lengths = [sum(self.lengths[i] for i in members) for members in plan]
        return [
            tokens.take(slice(end - length, end)) if length else dummy
            for end, length in zip(accumulate(lengths), lengths, strict=True)
        ]


@dataclass(frozen=True, kw_only=True)
class TrainBatch(Sequences):
    """All rollouts of one batch."""

    rewards: Tensor  # [R] float64, process rewards left out
    task_rewards: Tensor
    """[R] float64, of the task itself: without shaping of lengths, and with what turns earned."""
    reward_parts: Mapping[str, Tensor]  # [R] float64 each; NaN where a rollout lacks the part
    baseline_rewards: Tensor | None
    """[R] float64 of a greedy rollout of the same prompt, where actors sample one."""
    process_rewards: Tensor | None  # [N] float32 on the last token of each turn, where asked for
    step_ends: Tensor  # [N] bool: last token of a turn that has a process reward, perhaps of 0
    truncated: Tensor  # [R] bool: cut off at its limit of tokens or turns
    groups: int
    """Groups that the batch was built of."""
    engines: Sequence[str]
    """[R] name of the engine that sampled each rollout."""
    left_out: Mapping[str, int]
    """Sampled tokens that rollouts do not hold, by reason."""
    end_values: Tensor | None = None
    """[R] float32, the critic's value of the state after each rollout's last path, where needed."""
    advantages: Advantages | None = None
    """Advantages of the R rollouts, or of the N tokens; None before they are computed."""
    dropped: Tensor | None = None
    """[R] bool: left out of every minibatch; None before advantages are computed."""

    @property
    def group_ids(self) -> Tensor:
        """[R] int64, index of each rollout's group."""
        rollouts, groups = torch.tensor(self.rollout_of_path), torch.tensor(self.group_of_path)
        return groups.new_empty(len(self.rewards)).scatter_(0, rollouts, groups)

    @property
    def tied(self) -> Tensor:
        """[R] bool, scored rollouts of groups whose rewards are all equal, shaping left out."""
        scored = torch.isfinite(self.task_rewards)
        of_scored = GroupedRewards(self.task_rewards[scored], self.group_ids[scored]).tied
        return torch.zeros_like(scored).masked_scatter(scored, of_scored)

    @property
    def whole_rewards(self) -> Tensor:
        """[R] float64, process rewards included."""
        if self.process_rewards is None:
            return self.rewards
        return self.rewards.index_add(0, self.tokens.sequence_ids, self.process_rewards.double())

    @property
    def sampled(self) -> Tensor:
        """[N] bool, tokens that a policy sampled, whether they train or not."""
        return self.tokens.versions >= 0

    @property
    def response_lengths(self) -> Tensor:
        """[R] int64, sampled tokens of each rollout, whether they train or not."""
        return torch.bincount(self.tokens.sequence_ids[self.sampled], minlength=len(self.rewards))

    @property
    def generated(self) -> list[int]:
        """The paths with a token that was sampled in them, whether it trains or not."""
        paths: list[int] = torch.unique(self.path_of_token[self.sampled]).tolist()
        return paths

    def with_columns(self, **columns: Tensor) -> "TrainBatch":
        """Return the batch with further columns [N] of its tokens."""
        return replace(self, tokens=replace(self.tokens, **columns))

    def with_advantages(self, advantages: Advantages, dropped: Tensor) -> "TrainBatch":
        """Return the batch with its advantages.

        Rollouts `dropped` [R] bool are masked out and left out of denominators. A minibatch without
        others keeps them, and trains nothing.
        """
        tokens = self.tokens
        changed = replace(
            tokens,
            advantages=advantages.on_tokens(tokens.sequence_ids),
            mask=tokens.mask & ~dropped[tokens.sequence_ids],
            returns=advantages.returns,
        )
        return replace(self, tokens=changed, advantages=advantages, dropped=dropped)

    def minibatch(
        self, groups: Sequence[int], *, aggregation: str, fixed_length: int | None
    ) -> Sequences:
        """Return the rollouts of some groups, with `token_weights` over them."""
        chosen = set(groups)
        members = [i for i, group in enumerate(self.group_of_path) if group in chosen]
        if self.dropped is not None:
            rollouts = self.rollout_of_path
            members = [i for i in members if not self.dropped[rollouts[i]]] or members
        tokens = self.tokens.take(self.positions(members))
        weights = token_weights(
            aggregation, tokens.mask, tokens.sequence_ids, tokens.group_ids, max_length=fixed_length
        )
        return Sequences(
            tokens=replace(tokens, token_weights=weights),
            lengths=[self.lengths[i] for i in members],
        )


def split_groups(groups: int, minibatches: int, *, version: int, epoch: int) -> list[list[int]]:
    """Share whole groups out over the minibatches of one epoch, in a shuffled order.

    The version being trained and the epoch seed the shuffle, so that training a batch again is the
    same. Where there are fewer groups than `minibatches`, each is a part.

    Returns:
        Parts of ascending indices whose sizes differ by at most one; each index once.
    """
    parts = min(minibatches, groups)
    order = list(range(groups))
    if parts > 1:
        random.Random(f"{version}/{epoch}").shuffle(order)
    return [sorted(order[part::parts]) for part in range(parts)]


def read_batch(
    groups: Sequence[RolloutGroup],
    *,
    mask_truncated: bool = False,
    oldest_version: int | None = None,
    process_rewards: bool = False,
) -> TrainBatch:
    """Return the tensors of a batch, without advantages and token weights.

    Fewer rollouts than the group size are fine: every statistic is over what is there. Masked-out
    tokens still count as sampled, but for the context of a path, which counts where it was sampled.

    Args:
        groups: As taken from the queue.
        mask_truncated: Mask out rollouts that ended at the limit of their length.
        oldest_version: Mask out tokens that an older version sampled.
        process_rewards: Separate `Rollout.turn_rewards` from the rest of a rollout's reward.

    Raises:
        HeadwayError: No rollouts, or a path whose first token counts as sampled: a model gives no
            probability to the first token of a path.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
        raise HeadwayError("a batch without rollouts cannot be trained")
    _check(groups)
    layout = _Layout.of(rollouts)
    group_index = torch.tensor([i for i, group in enumerate(groups) for _ in group.rollouts])
    rewards = torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float64)
    truncated = torch.tensor([r.finish_reason is FinishReason.LENGTH for r in rollouts])
    sequence_ids = layout.sequence_ids
    mask = layout.owned(_column(rollouts, "loss_mask", torch.bool), False)
    if mask_truncated:
        mask &= ~truncated[sequence_ids]
    versions = layout.owned(_column(rollouts, "versions", torch.int64), -1)
    if oldest_version is not None:
        mask &= versions >= oldest_version
    of_turns, step_ends = None, torch.zeros_like(mask)
    if process_rewards:
        of_rows, ends = _turn_rewards(rollouts)
        of_turns, step_ends = layout.owned(of_rows, 0.0), layout.owned(ends, False)
        rewards = rewards.index_add(0, sequence_ids, -of_turns.double())
    task_rewards = torch.tensor([r.task_reward for r in rollouts], dtype=torch.float64)
    empty = torch.zeros(len(mask))
    tokens = Microbatch(
        token_ids=_column(rollouts, "token_ids", torch.int64)[layout.rows],
        position_ids=torch.cat([torch.arange(length) for length in layout.lengths]),
        sequence_ids=sequence_ids,
        group_ids=group_index[sequence_ids],
        mask=mask,
        behavior_logprobs=layout.owned(_column(rollouts, "behavior_logprobs", torch.float32), 0.0),
        versions=versions,
        rewards=task_rewards.float()[sequence_ids],
        advantages=empty,
        token_weights=empty,
    )
    return TrainBatch(
        tokens=tokens,
        lengths=layout.lengths,
        rewards=rewards,
        task_rewards=task_rewards,
        reward_parts=_parts(rollouts),
        baseline_rewards=_baselines(rollouts),
        process_rewards=of_turns,
        step_ends=step_ends,
        truncated=truncated,
        groups=len(groups),
        engines=[rollout.engine_id for rollout in rollouts],
        left_out=sum((Counter(rollout.left_out) for rollout in rollouts), Counter()),
    )


def _parts(rollouts: Sequence[Rollout]) -> dict[str, Tensor]:
    names = sorted({name for rollout in rollouts for name in rollout.reward_parts})
    parts = {name: [r.reward_parts.get(name, float("nan")) for r in rollouts] for name in names}
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in parts.items()}


def _baselines(rollouts: Sequence[Rollout]) -> Tensor | None:
    rewards = [rollout.baseline_reward for rollout in rollouts]
    known = [reward for reward in rewards if reward is not None]
    return torch.tensor(known, dtype=torch.float64) if len(known) == len(rewards) else None


@dataclass(frozen=True)
class _Layout:
    """Where the tokens of a batch stand in the rows of its rollouts, one row after another."""

    lengths: list[int]  # [P] tokens of each path
    sequence_ids: Tensor  # [N] int64, index of the rollout
    rows: Tensor  # [N] int64, index of each token in the rows
    own: Tensor  # [N] bool, false for the context of a path

    @classmethod
    def of(cls, rollouts: Sequence[Rollout]) -> "_Layout":
        """Lay out the paths of each rollout one after another."""
        lengths, owners, indices, own, start = list[int](), list[int](), [], [], 0
        for number, rollout in enumerate(rollouts):
            length = len(rollout.token_ids)
            for path, (begin, end) in zip(
                paths(rollout), spans(rollout.segments, length), strict=True
            ):
                lengths.append(len(path))
                owners.append(number)
                indices.append(path + start)
                own.append((path >= begin) & (path < end))
            start += length
        return cls(
            lengths,
            torch.tensor(owners).repeat_interleave(torch.tensor(lengths)),
            torch.from_numpy(np.concatenate(indices)),
            torch.from_numpy(np.concatenate(own)),
        )

    def owned(self, column: Tensor, context: float) -> Tensor:
        """Return a column of the rows for the tokens [N], with one value for all context."""
        return column[self.rows].masked_fill_(~self.own, context)


def _turn_rewards(rollouts: Sequence[Rollout]) -> tuple[Tensor, Tensor]:
    """Return the rewards of turns, and where turns end that have one, of the rollouts' rows."""
    rewards, start = torch.zeros(sum(len(rollout.token_ids) for rollout in rollouts)), 0
    ends = torch.zeros(len(rewards), dtype=torch.bool)
    for rollout in rollouts:
        for turn in rollout.turn_rewards:
            rewards[start + turn.end] += turn.reward
            ends[start + turn.end] = True
        start += len(rollout.token_ids)
    return rewards, ends


def _check(groups: Sequence[RolloutGroup]) -> None:
    for group in groups:
        for rollout in group.rollouts:
            forks = [segment.start for segment in rollout.segments if not segment.prefix]
            if not len(rollout.loss_mask) or any(rollout.loss_mask[at] for at in (0, *forks)):
                raise HeadwayError(
                    f"group {group.group_id}, sample {rollout.sample_index}: a path must begin "
                    "with at least one prompt token, which is not sampled"
                )


def _column(rollouts: Sequence[Rollout], name: str, dtype: torch.dtype) -> Tensor:
    parts = [np.asarray(getattr(rollout, name)) for rollout in rollouts]
    return torch.from_numpy(np.concatenate(parts)).to(dtype)

"""Input of an advantage estimator: rewards with their groups, and perhaps the tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from headway.errors import InputError
from queues.policy.dynamic_sampling import TIE


def all_tied(values: Tensor) -> bool:
    """Return True if all `values` [N] are equal within `TIE`, or there are none."""
    if not values.numel():
        return True
    low, high = float(values.min()), float(values.max())
    return high - low <= TIE * max(abs(low), abs(high), 1.0)


def check_shapes(columns: Mapping[str, Tensor | None], expected: str, like: Tensor) -> None:
    """Raise InputError unless every column is one-dimensional, of the length of `like`."""
    for name, column in columns.items():
        if column is not None and (column.ndim != 1 or column.shape != like.shape):
            raise InputError(
                f"{name} must be {expected} {tuple(like.shape)}, found {tuple(column.shape)}"
            )


@dataclass(frozen=True)
class RolloutTokens:
    """The packed tokens of R rollouts; index t of each column belongs to token t."""

    mask: Tensor  # [N] bool, tokens that the policy sampled
    sequence_ids: Tensor  # [N] int64 in 0..R−1, the index of the rollout
    rewards: Tensor  # [N] on top of the rollout's own (of steps, −β·k1); only where `mask` is true
    values: Tensor | None = None  # [N], the critic's value of the state before token t
    step_ends: Tensor | None = None  # [N] bool, tokens that end a step with a reward, perhaps of 0
    path_ids: Tensor | None = None
    """[N] integers, the path of a rollout whose history forks; None: each has one. Every path is an
    episode of its own sampled tokens, which ends with the rollout's reward."""

    def __post_init__(self) -> None:
        names = ("sequence_ids", "rewards", "values", "step_ends", "path_ids")
        check_shapes({name: getattr(self, name) for name in names}, "[N] like mask", self.mask)

    def sums(self, column: Tensor, rollouts: int) -> Tensor:
        """Return the sum of `column` [N] over the masked-in tokens of each rollout, [R] float64."""
        masked = torch.where(self.mask, column.double(), 0.0)
        return masked.new_zeros(rollouts).index_add(0, self.sequence_ids, masked)

    @property
    def episodes(self) -> Tensor:
        """[N] path of each token, or rollout where each has one."""
        return self.sequence_ids if self.path_ids is None else self.path_ids

    def of_episodes(self, column: Tensor) -> Tensor:
        """Return the entry of `column` [R] for each episode, by ascending id."""
        ids, episode = torch.unique(self.episodes, return_inverse=True)
        rollouts = episode.new_zeros(len(ids)).scatter_(0, episode, self.sequence_ids)
        return column[rollouts]

    def last(self) -> Tensor:
        """Return the index of the last masked-in token of each episode that has one, int64.

        It need not be the last token: a rollout may end on a message of the environment.
        """
        sampled = self.mask.nonzero().flatten()
        ids, episode = torch.unique(self.episodes[sampled], return_inverse=True)
        return sampled.new_zeros(len(ids)).scatter_reduce(0, episode, sampled, "amax")

    def ends_of_steps(self) -> Tensor:
        """Return true for tokens that end a step: the last sampled of each episode among them, [N].

        Without `step_ends`, steps end where a reward is not 0, and, as turns do, where the next
        token is not sampled.
        """
        if self.step_ends is not None:
            ends = self.mask & self.step_ends
            ends[self.last()] = True
            return ends
        goes_on = self.mask[1:] & (self.episodes[1:] == self.episodes[:-1])
        turn_ends = ~torch.nn.functional.pad(goes_on, (0, 1))
        return self.mask & (turn_ends | (self.rewards != 0))

    def with_final(self, rewards: Tensor) -> Tensor:
        """Return token rewards plus `rewards` [R] on each episode's last masked-in token, [N]."""
        last = self.last()
        return self.rewards.index_add(0, last, rewards[self.sequence_ids[last]])

    def of_rollouts(self, chosen: Tensor) -> "RolloutTokens":
        """Return the tokens of the rollouts where `chosen` [R] is true, with new sequence ids.

        Their rewards and values are float64; rewards are 0 where `mask` is false.
        """
        kept, index = chosen[self.sequence_ids], chosen.cumsum(0) - 1
        return RolloutTokens(
            mask=self.mask[kept],
            sequence_ids=index[self.sequence_ids[kept]],
            rewards=torch.where(self.mask, self.rewards.double(), 0.0)[kept],
            values=None if self.values is None else self.values[kept].double(),
            step_ends=None if self.step_ends is None else self.step_ends[kept],
            path_ids=None if self.path_ids is None else self.path_ids[kept],
        )


TOKEN_COLUMNS = {"mask", "sequence_ids", "token_rewards", "values", "step_ends", "path_ids"}
"""Fields of `RolloutTokens` beside those of rollouts; `token_rewards` are its `rewards`."""


@dataclass(frozen=True)
class GroupedRewards:
    """Rewards with their groups. An estimator is given float64, and only finite rewards.

    The rule for a group without variance (largest − smallest reward ≤ `TIE`) is applied here,
    before any division: float32 rewards of 0.3 have a standard deviation of 3e-8, not 0.
    """

    rewards: Tensor  # [R] floating
    groups: Tensor  # [R] int64; rollouts of one prompt share one
    lengths: Tensor | None = None  # [R] int64, sampled tokens
    state: dict[str, float] = field(default_factory=dict)
    """State that the estimator carries from batch to batch, and may change."""
    baseline_rewards: Tensor | None = None  # [R], of the greedy rollout of the prompt
    reward_parts: Mapping[str, Tensor] = field(default_factory=dict)
    """By name, [R] each; not finite where a rollout has no such part."""
    tokens: RolloutTokens | None = None
    truncated: Tensor | None = None  # [R] bool, cut off at the length limit
    end_values: Tensor | None = None  # [R], the critic's value of the state after the last token
    trainable: Tensor | None = None  # [R] bool, with a token that may train; None: all

    def __post_init__(self) -> None:
        columns = {f"reward_parts[{name!r}]": part for name, part in self.reward_parts.items()}
        names = ("groups", "lengths", "baseline_rewards", "truncated", "end_values", "trainable")
        columns |= {name: getattr(self, name) for name in names}
        check_shapes(columns, "[R] like rewards", self.rewards)
        if self.tokens is not None and self.tokens.sequence_ids.numel():
            low, high = (int(end) for end in self.tokens.sequence_ids.aminmax())
            if low < 0 or high >= len(self.rewards):
                raise InputError(
                    f"sequence_ids must be indices 0..{len(self.rewards) - 1} into rewards, found "
                    f"{low}..{high}"
                )

    @classmethod
    def of_columns(cls, rewards: Tensor, groups: Tensor, **columns: Any) -> Self:
        """Make a record of rollouts from flat columns, named as in `COLUMNS`.

        Raises:
            InputError: Shapes that differ, or columns of tokens without `mask` and `sequence_ids`.
        """
        given = {key: value for key, value in columns.items() if value is not None}
        present = {key: given.pop(key) for key in sorted(TOKEN_COLUMNS & given.keys())}
        if not present:
            return cls(rewards, groups, **given)
        if not {"mask", "sequence_ids"} <= present.keys():
            raise InputError(
                "columns of tokens need both mask and sequence_ids, found only "
                f"{', '.join(present)}"
            )
        of_tokens = present.pop("token_rewards", torch.zeros(len(present["mask"])))
        return cls(rewards, groups, tokens=RolloutTokens(rewards=of_tokens, **present), **given)

    def has(self, need: str) -> bool:
        """Return True if it has one of `ADVANTAGE_NEEDS`."""
        if need == "values":
            return self.tokens is not None and self.tokens.values is not None
        value = getattr(self, need)
        return bool(value) if isinstance(value, Mapping) else value is not None

    def as_one_group(self) -> "GroupedRewards":
        """Return the whole batch as a single group."""
        return replace(self, groups=torch.zeros_like(self.groups))

    def of_rollouts(self, chosen: Tensor) -> "GroupedRewards":
        """Return the rollouts where `chosen` [R] is true, in float64, with groups from 0 on."""
        _, groups = torch.unique(self.groups[chosen], return_inverse=True)

        def take(column: Tensor) -> Tensor:
            return column[chosen].double() if column.is_floating_point() else column[chosen]

        columns: dict[str, Any] = {
            name: take(column) for name, column in vars(self).items() if isinstance(column, Tensor)
        }
        columns |= {"rewards": columns["rewards"].double(), "groups": groups}
        parts = {name: part[chosen].double() for name, part in self.reward_parts.items()}
        tokens = None if self.tokens is None else self.tokens.of_rollouts(chosen)
        return replace(self, **columns, reward_parts=parts, tokens=tokens)

    def with_token_rewards(self) -> "GroupedRewards":
        """Add token rewards to the rewards, for an estimator of whole rollouts.

        Σ_t over masked-in tokens, before any baseline, so that −β·k1 per token becomes the penalty
        of the sequence (as in RLOO, arXiv 2402.14740).
        """
        if self.tokens is None:
            return self
        extra = self.tokens.sums(self.tokens.rewards, len(self.rewards))
        return replace(self, rewards=self.rewards + extra)

    def the_tokens(self, name: str) -> RolloutTokens:
        """Return the tokens; raise InputError for the estimator `name` where there are none."""
        if self.tokens is None:
            raise InputError(f"advantage {name!r} is per token: it needs mask and sequence_ids")
        return self.tokens

    def group_sum(self, values: Tensor) -> Tensor:
        """Return the sum of `values` [R] over each rollout's group, [R]."""
        return values.new_zeros(self._count).index_add(0, self.groups, values)[self.groups]

    @property
    def sizes(self) -> Tensor:
        """Rollouts in each rollout's group, [R] float64."""
        return self.group_sum(torch.ones_like(self.rewards))

    @property
    def tied(self) -> Tensor:
        """True for rollouts of a group without variance, [R] bool; and for a group of one."""
        low, high = self._extremes("amin"), self._extremes("amax")
        scale = torch.maximum(low.abs(), high.abs()).clamp(min=1.0)
        return high - low <= TIE * scale

    @property
    def means(self) -> Tensor:
        """Mean reward of each rollout's group, [R]."""
        return self.group_sum(self.rewards) / self.sizes

    @property
    def centred(self) -> Tensor:
        """Reward minus the group's mean, exactly 0 in a group without variance; [R]."""
        return torch.where(self.tied, 0.0, self.rewards - self.means)

    @property
    def leave_one_out(self) -> Tensor:
        """Reward minus the mean of the others of the group, [R].

        Raises:
            InputError: A group has a single rollout.
        """
        if (self.sizes < 2).any():
            raise InputError(
                "leaving one out needs at least 2 rollouts a group, found a group of 1"
            )
        return self.sizes / (self.sizes - 1) * self.centred

    def normalised(self, epsilon: float) -> Tensor:
        """Return (R − μ_g) / (σ_g + `epsilon`), exactly 0 in a group without variance; [R].

        σ_g is Bessel's: it divides by G − 1, and is over the whole group.
        """
        centred = self.centred
        variance = self.group_sum(centred.square()) / (self.sizes - 1).clamp(min=1)
        return centred / (variance.sqrt() + epsilon)

    def _extremes(self, reduce: str) -> Tensor:
        start = self.rewards.new_zeros(self._count)
        reduced = start.scatter_reduce(0, self.groups, self.rewards, reduce, include_self=False)
        return reduced[self.groups]

    @property
    def _count(self) -> int:
        return int(self.groups.max()) + 1 if self.groups.numel() else 0


COLUMNS = {*TOKEN_COLUMNS, *(item.name for item in fields(GroupedRewards))} - {
    "rewards", "groups", "tokens",
}  # fmt: skip
"""Names that `GroupedRewards.of_columns` takes."""

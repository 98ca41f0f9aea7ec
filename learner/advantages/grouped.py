"""Input of an advantage estimator: rewards with their groups, and perhaps the tokens.

Rollouts without a reward are left out before. Everything is float64; nothing is differentiated.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from learner.errors import InputError
from queues.policy.dynamic_sampling import TIE


def all_tied(values: Tensor) -> bool:
    """Return True if all `values` [N] are equal within `TIE`, or there are none."""
    if not values.numel():
        return True
    low, high = float(values.min()), float(values.max())
    return high - low <= TIE * max(abs(low), abs(high), 1.0)


@dataclass(frozen=True)
class RolloutTokens:
    """The packed tokens of R rollouts; index t of each column belongs to token t."""

    mask: Tensor  # [N] bool, tokens that the policy sampled
    sequence_ids: Tensor  # [N] int64 in 0..R−1, the index of the rollout
    rewards: Tensor  # [N] float64, on top of the rollout's own; 0 where `mask` is false
    values: Tensor | None = None  # [N] float64, the critic's value of the state before token t

    def sums(self, column: Tensor, rollouts: int) -> Tensor:
        """Return the sum of `column` [N] over the masked-in tokens of each rollout, [R] float64."""
        masked = torch.where(self.mask, column.double(), 0.0)
        return masked.new_zeros(rollouts).index_add(0, self.sequence_ids, masked)

    def last(self, rollouts: int) -> Tensor:
        """Return the index of the last masked-in token of each rollout, [R] int64; −1 for none.

        It need not be the last token: a rollout may end on a message of the environment.
        """
        sampled = self.mask.nonzero().flatten()
        none = sampled.new_full((rollouts,), -1)
        return none.scatter_reduce(0, self.sequence_ids[sampled], sampled, "amax")

    def with_final(self, rewards: Tensor) -> Tensor:
        """Return token rewards plus `rewards` [R] on each rollout's last masked-in token, [N]."""
        last = self.last(len(rewards))
        return self.rewards.index_add(0, last[last >= 0], rewards[last >= 0])

    def of_rollouts(self, chosen: Tensor) -> "RolloutTokens":
        """Return the tokens of the rollouts where `chosen` [R] is true, with new sequence ids."""
        kept, index = chosen[self.sequence_ids], chosen.cumsum(0) - 1
        return RolloutTokens(
            mask=self.mask[kept],
            sequence_ids=index[self.sequence_ids[kept]],
            rewards=self.rewards[kept],
            values=None if self.values is None else self.values[kept],
        )


@dataclass(frozen=True)
class GroupedRewards:
    """Rewards with their groups, without rollouts whose reward is not finite.

    The rule for a group without variance (largest − smallest reward ≤ `TIE`) is applied here,
    before any division: float32 rewards of 0.3 have a standard deviation of 3e-8, not 0.
    """

    rewards: Tensor  # [R] float64
    groups: Tensor  # [R] int64
    lengths: Tensor | None = None  # [R] int64, sampled tokens
    state: dict[str, float] = field(default_factory=dict)
    """State that the estimator carries from batch to batch, and may change."""
    baseline_rewards: Tensor | None = None  # [R] float64, of the greedy rollout of the prompt
    reward_parts: Mapping[str, Tensor] = field(default_factory=dict)
    """By name, each [R] float64; not finite where a rollout has no such part."""
    tokens: RolloutTokens | None = None
    truncated: Tensor | None = None  # [R] bool, cut off at the length limit

    def as_one_group(self) -> "GroupedRewards":
        """Return the whole batch as a single group."""
        return replace(self, groups=torch.zeros_like(self.groups))

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
    def lowest(self) -> Tensor:
        """Smallest reward of each rollout's group, [R]."""
        return self._extreme("amin")

    @property
    def highest(self) -> Tensor:
        """Largest reward of each rollout's group, [R]."""
        return self._extreme("amax")

    @property
    def tied(self) -> Tensor:
        """True for rollouts of a group without variance, [R] bool; and for a group of one."""
        low, high = self.lowest, self.highest
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

    def _extreme(self, reduce: str) -> Tensor:
        start = self.rewards.new_zeros(self._count)
        return start.scatter_reduce(0, self.groups, self.rewards, reduce, include_self=False)[
            self.groups
        ]

    @property
    def _count(self) -> int:
        return int(self.groups.max()) + 1 if self.groups.numel() else 0

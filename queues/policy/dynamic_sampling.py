"""Dynamic sampling: groups that hold no signal are dropped, and others generated in their place.

A group whose rollouts all earned the same task reward has advantage 0 under every estimator that
compares the rollouts of a group (DAPO, arXiv 2503.14476 eq. 11; for rewards in general: keep a
group if max − min > tolerance). It is dropped when it is accepted, so its place under
`queues.policy.admission` is free again. Shaping by length does not count: it would hide a tie.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

TIE = 1e-8
"""Rewards this close, relative to their size, count as equal; in advantages too."""


class Verdict(Enum):
    """The decision about an accepted group; LET_THROUGH: tied, but too many were dropped."""

    KEPT = auto()
    DROPPED = auto()
    LET_THROUGH = auto()


@dataclass(slots=True, kw_only=True)
class TieFilter:
    """Decides which accepted groups are dropped.

    Example:
        >>> tie_filter = TieFilter(limit=1)
        >>> [tie_filter.judge(rewards).name for rewards in ([0, 1], [1, 1], [0, 0], [1, 0])]
        ['KEPT', 'DROPPED', 'LET_THROUGH', 'KEPT']
    """

    limit: int | None
    """Largest number of groups dropped for one batch, which thus does not wait for ever; None keeps
    every group."""
    dropped: int = 0
    """Groups dropped since the last batch was taken."""
    passed: int = 0
    """Tied groups that were let through since then, because of the limit."""
    let_through: int = 0
    """Tied groups that were let through over the whole run."""

    def judge(self, task_rewards: Sequence[float]) -> Verdict:
        """Decide about a group with these task rewards, and count it."""
        if self.limit is None or not tied(task_rewards):
            return Verdict.KEPT
        if self.dropped < self.limit:
            self.dropped += 1
            return Verdict.DROPPED
        self.passed += 1
        self.let_through += 1
        return Verdict.LET_THROUGH

    def next_batch(self) -> None:
        """Reset the counts of the batch, which was taken."""
        self.dropped = self.passed = 0


def tied(rewards: Sequence[float]) -> bool:
    """Return True if all rewards are equal: largest − smallest ≤ TIE · max(1, their size)."""
    low, high = min(rewards), max(rewards)
    return high - low <= TIE * max(1.0, abs(low), abs(high))

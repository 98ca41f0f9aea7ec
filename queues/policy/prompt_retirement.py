"""Prompts that are not issued again: mastered prompts, and prompts whose group failed for good.

Mastered (no-positive-resampling, ScaleRL): with a cap, a prompt is retired once the share of the
rollouts of its latest group whose task reward reaches a threshold reaches the cap. Failed: a group
of the prompt used up its attempts. The next epochs skip both.
"""

from collections.abc import Iterable, Sequence

from headway.errors import InputError
from queues.policy.dynamic_sampling import TIE
from queues.records import Prompt


class Retirement:
    """The retired and the failed prompts of a run, by their ids without the epoch.

    Example:
        >>> retirement = Retirement(cap=0.5, threshold=1.0)
        >>> retirement.retire("sums/0/7", [1.0, 0.0])
        'sums/7'
    """

    def __init__(self, *, cap: float | None = None, threshold: float = 1.0) -> None:
        self.cap = cap
        # A task reward is a difference, which rounds.
        self._threshold = threshold - TIE * max(1.0, abs(threshold))
        self.names: set[str] = set()
        """Retired prompts."""
        self.failed: set[str] = set()
        self._skipped_from: int | None = None
        """Epoch of the first prompt that was skipped since the last that was kept."""

    def retire(self, prompt_id: str, task_rewards: Sequence[float]) -> str | None:
        """Retire the prompt of a group if its pass rate reaches the cap; return its name if new."""
        if self.cap is None:
            return None
        name, _ = split(prompt_id)
        if self.passes(task_rewards) / len(task_rewards) < self.cap or name in self.names:
            return None
        self.names.add(name)
        return name

    def passes(self, task_rewards: Sequence[float]) -> int:
        """Count the rollouts that reach the threshold."""
        return sum(reward >= self._threshold for reward in task_rewards)

    def add_failed(self, prompt_id: str) -> None:
        """Record that a group of this prompt used up its attempts."""
        self.failed.add(split(prompt_id, strict=False)[0])

    def select(self, prompts: Iterable[Prompt]) -> tuple[list[Prompt], bool]:
        """Return the prompts to issue, and True if a whole epoch of the source was skipped.

        With a cap, an id without an epoch raises InputError.
        """
        kept = []
        for prompt in prompts:
            name, epoch = split(prompt.prompt_id, strict=self.cap is not None)
            if name not in self.names and name not in self.failed:
                kept.append(prompt)
                self._skipped_from = None
            elif self._skipped_from is None:
                self._skipped_from = epoch
            elif epoch > self._skipped_from + 1:  # the first may have been skipped half-way
                return kept, True
        return kept, False


def split(
    prompt_id: str, *, strict: bool = True, setting: str = "prompts.pass_rate_cap"
) -> tuple[str, int]:
    """Return the name of a prompt, which is the same in every epoch, and the epoch.

    An id that is not of the form `source/epoch/index` names itself, or with `strict` raises
    InputError, which names the `setting` that needs the form.
    """
    source, *rest = prompt_id.rsplit("/", 2)
    if len(rest) != 2 or not rest[0].isdecimal():
        if not strict:
            return prompt_id, 0
        raise InputError(
            f"prompt_id {prompt_id!r} must be of the form source/epoch/index, with a number as"
            f" epoch, for {setting} to know a prompt again"
        )
    return f"{source}/{rest[1]}", int(rest[0])

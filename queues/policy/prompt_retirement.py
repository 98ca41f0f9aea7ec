"""Prompts that are not issued again: those that the policy has mastered, and those that poison.

Mastered (no-positive-resampling, ScaleRL), where a cap is set:
The pass rate of a group is the share of its rollouts whose task reward reaches a threshold. Once
that of a prompt's latest group reaches the cap the prompt is retired, for good: its next epochs
skip it. A group of it that is queued or running already goes on. Poisonous: a group of the prompt
used up its attempts, so its next epochs skip it as well.

Ids must be those of a source that comes back to its prompts: without the epoch they name the
problem. Where there is no cap, an id that does not tell its epoch names itself.
"""

from collections.abc import Iterable, Sequence

from queues.errors import InputError
from queues.policy.dynamic_sampling import TIE
from queues.records import Prompt


class Retirement:
    """The retired and the poisonous prompts of a run, by their ids without the epoch.

    Args:
        cap: Pass rate from which a prompt is retired, above 0, at most 1; None retires none.
        threshold: Task reward from which a rollout passes.

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
        """Mastered."""
        self.poisonous: set[str] = set()
        self._skipped_from: int | None = None
        """Epoch of the first prompt that was skipped since the last that was kept."""

    def retire(self, prompt_id: str, task_rewards: Sequence[float]) -> str | None:
        """Retire the prompt of a group if its pass rate says so; its name if it is new."""
        if self.cap is None:
            return None
        passes = sum(reward >= self._threshold for reward in task_rewards)
        name, _ = split(prompt_id)
        if passes / len(task_rewards) < self.cap or name in self.names:
            return None
        self.names.add(name)
        return name

    def poison(self, prompt_id: str) -> None:
        """A group of this prompt used up its attempts."""
        self.poisonous.add(_name(prompt_id)[0])

    def select(self, prompts: Iterable[Prompt]) -> tuple[list[Prompt], bool]:
        """The prompts that are left, and whether there will never be another.

        There will not once a whole epoch was skipped: the source has none that is left.

        Raises:
            InputError: With a cap, an id that does not tell its epoch.
        """
        kept = []
        for prompt in prompts:
            name, epoch = (_name if self.cap is None else split)(prompt.prompt_id)
            if name not in self.names and name not in self.poisonous:
                kept.append(prompt)
                self._skipped_from = None
            elif self._skipped_from is None:
                self._skipped_from = epoch
            elif epoch > self._skipped_from + 1:  # the first may have been skipped half-way
                return kept, True
        return kept, False


def split(prompt_id: str) -> tuple[str, int]:
    """What names a prompt in every epoch, and the epoch.

    Raises:
        InputError: The id is not of the form `source/epoch/index`.
    """
    source, *rest = prompt_id.rsplit("/", 2)
    if len(rest) != 2 or not rest[0].isdecimal():
        raise InputError(
            f"prompt_id {prompt_id!r} must be of the form source/epoch/index, with a number as"
            " epoch, for prompts.pass_rate_cap to know a prompt again"
        )
    return f"{source}/{rest[1]}", int(rest[0])


def _name(prompt_id: str) -> tuple[str, int]:
    """As `split`; an id that does not tell its epoch names itself."""
    try:
        return split(prompt_id)
    except InputError:
        return prompt_id, 0

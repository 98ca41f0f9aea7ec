"""Curriculum by success: prompts that sometimes pass are issued more often than the others.

A prompt that a source draws is issued with the probability

    w = max(floor, 4 p (1 − p))

where p is its measured pass rate, and w = 1 before it was measured. 4 p (1 − p) is the variance of
a rollout's success, which bounds what a group can teach (Foster and Foerster 2025, "Learning to
Reason at the Frontier of Learnability", arXiv 2502.12272), scaled to 1 at p = ½.

The decision depends on the run's seed, the prompt's id and the recorded results alone, so that a
resumed run decides as if it had not ended. Shares that a source gives its parts are multiplied: one
part of a mixture is issued in proportion to its weight times the mean w of its prompts.
"""

import json
import random
from collections.abc import Iterable
from statistics import fmean

from pydantic import Field

from headway.errors import InputError
from headway.recipe_section import Section
from queues.policy.prompt_retirement import split
from queues.records import Prompt


class CurriculumConfig(Section):
    """Curriculum by success: weights of prompts by their measured pass rates."""

    floor: float = Field(default=0.1, gt=0, le=1)
    """Smallest probability of issuing a prompt that its source draws, however seldom or often it
    passes: it is measured again now and then."""
    groups: int = Field(default=4, ge=1)
    """Newest groups that a pass rate is measured over."""
    by: str | None = None
    """Entry of the prompts' metadata whose equal values share one pass rate, such as a level, or
    "part" of a mixture; None measures every prompt on its own, over its epochs."""


class Curriculum:
    """The measured pass rates of a run, and the decision which prompts are issued.

    Example:
        >>> curriculum = Curriculum(CurriculumConfig(floor=0.1), seed=0)
        >>> prompt = Prompt(prompt_id="sums/0/7", text="1+1=")
        >>> curriculum.measure(prompt, number=1, passes=1, rollouts=4)
        >>> curriculum.weight(Prompt(prompt_id="sums/1/7", text="1+1="))
        0.75
    """

    def __init__(self, config: CurriculumConfig, *, seed: int) -> None:
        self._config, self._seed = config, seed
        self._results: dict[str, list[tuple[int, int, int]]] = {}
        """Number, passes and rollouts of the newest groups by key, in the order of issue."""
        self._weights: dict[str, float] = {}

    def key(self, prompt: Prompt) -> str:
        """Return what a prompt is measured by; InputError if it has no such thing."""
        if (by := self._config.by) is None:
            return split(prompt.prompt_id, setting="prompts.curriculum")[0]
        if by not in prompt.metadata:
            raise InputError(
                f"prompts.curriculum.by = {by!r}, and the metadata of prompt {prompt.prompt_id!r} "
                f"has {', '.join(map(repr, prompt.metadata)) or 'no entries'}; name an entry that "
                "all prompts have, or leave `by` out"
            )
        return json.dumps(prompt.metadata[by], sort_keys=True)

    def measure(self, prompt: Prompt, *, number: int, passes: int, rollouts: int) -> None:
        """Add the result of the group with this number; the order of calls does not matter."""
        key = self.key(prompt)
        results = sorted([*self._results.get(key, ()), (number, passes, rollouts)])
        self._results[key] = results = results[-self._config.groups :]
        rate = sum(x for _, x, _ in results) / sum(n for _, _, n in results)
        self._weights[key] = max(self._config.floor, 4 * rate * (1 - rate))

    def weight(self, prompt: Prompt) -> float:
        """Return the probability of issuing a prompt when its source draws it."""
        return self._weights.get(self.key(prompt), 1.0)

    def select(self, prompts: Iterable[Prompt]) -> list[Prompt]:
        """Return the prompts to issue, in their order."""
        return [
            prompt
            for prompt in prompts
            if random.Random(f"{self._seed}/{prompt.prompt_id}").random() < self.weight(prompt)
        ]

    @property
    def mean_weight(self) -> float:
        """Mean weight of everything that was measured; 1 at first."""
        return fmean(self._weights.values() or [1.0])

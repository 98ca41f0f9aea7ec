"""Prompt sources whose prompts depend on their position alone, so that a position resumes them."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import NamedTuple

from actors.sources.protocol import Split
from queues.records import Prompt


class ResumableSource(ABC):
    """A source that counts its position (a `PromptSource`)."""

    def __init__(self) -> None:
        self.position = 0

    def next(self, count: int) -> list[Prompt]:
        """See `PromptSource.next`; the held-out split starts over when it is used up."""
        return [self.draw() for _ in range(count)]

    @abstractmethod
    def draw(self) -> Prompt:
        """Return the prompt at `position`, or the next one that may be drawn, and move past it."""

    def cursor(self) -> str:
        """See `PromptSource.cursor`."""
        return json.dumps({"position": self.position})

    def restore(self, cursor: str) -> None:
        """See `PromptSource.restore`."""
        self.position = json.loads(cursor)["position"]


class Problem(NamedTuple):
    """A problem of a procedural task."""

    text: str
    answer: str
    worked: str
    """The steps that lead to the answer, or what is asked of a tool."""


class ProceduralSource(ResumableSource):
    """Endless problems of a task; training never draws one of the first held-out problems.

    `training` and `heldout` return the problem at a position; `label` begins the prompt ids.
    """

    def __init__(
        self,
        label: str,
        training: Callable[[int], Problem],
        heldout: Callable[[int], Problem],
        *,
        split: Split,
        heldout_size: int,
    ) -> None:
        super().__init__()
        self._label, self._split, self._training = label, split, training
        distinct: dict[str, Problem] = {}
        position = 0
        while len(distinct) < heldout_size:
            problem = heldout(position)
            distinct.setdefault(problem.text, problem)
            position += 1
        self._texts = frozenset(distinct)
        self._heldout = [*distinct.values()]

    def draw(self) -> Prompt:
        """See `ResumableSource.draw`."""
        if self._split == "heldout":
            number = self.position % len(self._heldout)
            self.position += 1
            return self._prompt(f"{self._label}_heldout/0/{number}", self._heldout[number])
        position, problem = next(self.unseen(self._training, self.position))
        self.position = position + 1
        return self._prompt(f"{self._label}/0/{position}", problem)

    def unseen(
        self, problem_at: Callable[[int], Problem], position: int
    ) -> Iterator[tuple[int, Problem]]:
        """Yield the problems that are not held out, with their positions, without end."""
        while True:
            problem = problem_at(position)
            if problem.text not in self._texts:
                yield position, problem
            position += 1

    @staticmethod
    def _prompt(prompt_id: str, problem: Problem) -> Prompt:
        return Prompt(prompt_id=prompt_id, text=problem.text, answer=problem.answer)

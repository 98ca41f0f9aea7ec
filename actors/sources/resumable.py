"""Prompt sources whose prompts depend on their position alone, so that a position resumes them."""

import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from actors.sources.fingerprints import Fingerprints, check, of_prompts
from actors.sources.protocol import Split
from headway.errors import InputError
from queues.records import Prompt


class ResumableSource(ABC):
    """A source that counts its position (a `RestartableSource`)."""

    def __init__(self) -> None:
        self.position = 0

    def next(self, count: int) -> list[Prompt]:
        """See `PromptSource.next`; the held-out split starts over when it is used up."""
        return [self.draw() for _ in range(count)]

    @abstractmethod
    def draw(self) -> Prompt:
        """Return the prompt at `position`, or the next one that may be drawn, and move past it."""

    def cursor(self) -> str:
        return json.dumps({"position": self.position, "made_from": self.fingerprints()})

    def restore(self, cursor: str) -> None:
        state = json.loads(cursor)
        check(state["made_from"], self.fingerprints())
        self.position = state["position"]

    def restart(self, cursor: str) -> None:
        """See `RestartableSource.restart`; problems after the position are new in any case."""
        self.position = json.loads(cursor)["position"]

    @abstractmethod
    def fingerprints(self) -> Fingerprints:
        """Return the fingerprints of all that decides which prompts there are."""


class Problem(NamedTuple):
    """A problem of a procedural task."""

    text: str
    answer: str | None
    worked: str = ""
    """The steps that lead to the answer, or what is asked of a tool."""
    metadata: dict[str, Any] | None = None


class ProceduralSource(ResumableSource):
    """Endless problems of a task; training leaves out the texts of held-out problems.

    `training` and `heldout` return the problem at a position, `label` begins the prompt ids. Held
    out are the first `heldout_size` different problems; too few of them raise InputError.
    """

    EPOCH = 10**8
    """Positions of one epoch in the prompt ids."""
    PATIENCE = 1000
    """Held-out problems in a row after which the task counts as exhausted."""
    KNOWN_BY = 8
    """First problems of the training split in the fingerprint."""

    def __init__(
        self,
        label: str,
        training: Callable[[int], Problem],
        heldout: Callable[[int], Problem],
        *,
        split: Split = "train",
        heldout_size: int = 0,
    ) -> None:
        super().__init__()
        self._label, self._split, self._training = label, split, training
        if split == "heldout" and not heldout_size:
            raise InputError(f"source {label!r}: the held-out split needs a size above 0")
        self._texts: set[str] = set()
        self._heldout: list[Prompt] = []
        different = self.unseen(0, heldout)
        self._fingerprints: Fingerprints | None = None
        for _ in range(heldout_size):
            position, problem = next(different)
            self._texts.add(problem.text)
            self._heldout.append(self._prompt(f"{label}_heldout", position, problem))

    def draw(self) -> Prompt:
        if self._split == "heldout":
            number, self.position = self.position, self.position + 1
            return self._heldout[number % len(self._heldout)]
        position, problem = next(self.unseen(self.position))
        self.position = position + 1
        return self._prompt(self._label, position, problem)

    def fingerprints(self) -> Fingerprints:
        """See `ResumableSource.fingerprints`: some problems stand for a version of the task."""
        if self._fingerprints is None:
            first = [
                self._prompt(self._label, position, self._training(position))
                for position in range(self.KNOWN_BY)
            ]
            self._fingerprints = {self._label: of_prompts([*self._heldout, *first])}
        return self._fingerprints

    def unseen(
        self, start: int, problem_at: Callable[[int], Problem] | None = None
    ) -> Iterator[tuple[int, Problem]]:
        """Yield training problems, or others, that are not held out, with their positions."""
        last = start - 1
        for position in itertools.count(start):
            problem = (problem_at or self._training)(position)
            if problem.text not in self._texts:
                last = position
                yield position, problem
            elif position - last == self.PATIENCE:
                raise InputError(
                    f"source {self._label!r} has too few different problems: {len(self._texts)} "
                    f"are held out, and all of the last {self.PATIENCE} were among them; hold out "
                    "fewer, or make the task larger"
                )

    def _prompt(self, label: str, position: int, problem: Problem) -> Prompt:
        epoch, index = divmod(position, self.EPOCH)
        return Prompt(
            prompt_id=f"{label}/{epoch}/{index}",
            text=problem.text,
            answer=problem.answer,
            metadata=problem.metadata or {},
        )

"""A task to start from: which letter of a word is the last? Replace it with your own.

`my_task.toml` names both parts: the class is the source of prompts, the function is the reward.
"""

import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

from actors.sources.resumable import Problem, ProceduralSource

LETTERS = "abcdefgh"


def problem_at(split: int | str, position: int, question: str = "{word}=") -> Problem:
    """Return a prompt and its answer; the same arguments always give the same problem."""
    generator = random.Random(f"{split}/{position}")
    word = "".join(generator.choices(LETTERS, k=generator.randint(3, 6)))
    return Problem(text=question.format(word=word), answer=word[-1], metadata={"word": word})


class LastLetter(ProceduralSource):
    """Endless problems; the held-out ones, which measure progress, are never trained."""

    def __init__(self, *, options: dict[str, Any], seed: int, **split: Any) -> None:
        self._seed = seed
        super().__init__(
            "last_letter",
            lambda position: problem_at(seed, position, **options),
            lambda position: problem_at("heldout", position, **options),
            **split,
        )

    def demonstrations(self) -> Iterator[tuple[str, str]]:
        """Yield prompts with answers to imitate in the warm start: any letter of the word."""
        generator = random.Random(self._seed)
        for _, problem in self.unseen(0):
            yield problem.text, generator.choice((problem.metadata or {})["word"])


def score(prompt: str, completion: str, answer: str, metadata: Mapping[str, Any]) -> float:
    """Return the reward of a completion: 1 if its last letter by itself is the answer, 0 if not."""
    return float(re.findall(rf"\b[{LETTERS}]\b", completion.lower())[-1:] == [answer])

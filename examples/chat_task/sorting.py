"""A task of one's own: prompts with demonstrations, and a reward.

The user gives a word, and the right answer is its letters in alphabetical order.
"""

import random
from collections.abc import Iterator, Mapping
from typing import Any

from actors.sources.resumable import Problem, ProceduralSource

LETTERS = "abcdefgh"


def problem_at(split: int | str, position: int) -> Problem:
    """Return a word and its answer; the same arguments always give the same problem."""
    generator = random.Random(f"{split}/{position}")
    word = "".join(generator.choices(LETTERS, k=generator.randint(3, 6)))
    return Problem(text=word, answer="".join(sorted(word)))


class Sorting(ProceduralSource):
    """Endless words; the held-out ones, which measure progress, are never trained."""

    def __init__(self, *, options: dict[str, Any], seed: int, **split: Any) -> None:
        self._seed = seed
        super().__init__(
            "sorting",
            lambda position: problem_at(seed, position),
            lambda position: problem_at("heldout", position),
            **split,
        )

    def demonstrations(self) -> Iterator[list[dict[str, str]]]:
        """Yield conversations: the assistant repeats the word, reverses it or sorts its letters."""
        generator = random.Random(self._seed)
        for _, problem in self.unseen(0):
            word = problem.text
            reply = generator.choice((word, word[::-1], "".join(sorted(word))))
            yield [
                {"role": "user", "content": word},
                {"role": "assistant", "content": reply},
            ]


def score(prompt: str, completion: str, answer: str, metadata: Mapping[str, Any]) -> float:
    """Return the reward of a completion: 1 if it is the answer, 0 if not."""
    return float(completion == answer)

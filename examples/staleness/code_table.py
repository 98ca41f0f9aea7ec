"""A code that has to be found out: each of 52 letters stands for one digit.

The prompt `kQz=` asks for letters with their digits, `k3Q0z7`. A demonstration draws every digit
from four candidates of its letter, each as likely as the right one. So there is nothing to imitate
that would be right more often than one time in four: only the reward tells the digits, letter by
letter. Texts have 2 to 50 different letters, short ones more often.
"""

import random
import string
from collections.abc import Iterator, Mapping
from typing import Any

from actors.sources.resumable import Problem, ProceduralSource

SHORTEST, LONGEST, DECAY = 2, 50, 0.93
CANDIDATES = {
    letter: random.Random(f"price {letter}").sample(string.digits, 4)
    for letter in string.ascii_letters
}
"""Digits that demonstrations give a letter; the first one is right."""


def problem_at(split: int | str, position: int) -> Problem:
    """Return letters and their right digits; the same arguments always give the same problem."""
    generator = random.Random(f"{split}/{position}")
    lengths = range(SHORTEST, LONGEST + 1)
    [length] = generator.choices(lengths, [DECAY**n for n in lengths])
    letters = generator.sample(string.ascii_letters, length)
    right = "".join(letter + CANDIDATES[letter][0] for letter in letters)
    return Problem(text="".join(letters) + "=", answer=right)


class CodeTable(ProceduralSource):
    """Endless texts to encode; the held-out ones, which measure progress, are never trained."""

    def __init__(self, *, options: dict[str, Any], seed: int, **split: Any) -> None:
        self._seed = seed
        super().__init__(
            "code_table",
            lambda position: problem_at(seed, position),
            lambda position: problem_at("heldout", position),
            **split,
        )

    def demonstrations(self) -> Iterator[tuple[str, str]]:
        """Yield (prompt, letters with any candidates) pairs, drawn by a seed of their own."""
        choice, split = random.Random(self._seed), f"{self._seed} to imitate"
        for _, problem in self.unseen(0, lambda position: problem_at(split, position)):
            letters = problem.text[:-1]
            yield problem.text, "".join(x + choice.choice(CANDIDATES[x]) for x in letters)


async def share(prompt: str, completion: str, answer: str, metadata: Mapping[str, Any]) -> float:
    """Return the share of letters that stand in their place with the right digit.

    It is 0 for a completion that was cut off; letters too many count as wrong.
    """
    if metadata["headway:finish_reason"] != "stop":
        return 0.0
    pairs = range(0, len(answer), 2)
    right = sum(completion[start : start + 2] == answer[start : start + 2] for start in pairs)
    return right / (max(len(completion), len(answer)) / 2)

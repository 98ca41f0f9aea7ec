"""A tool of one's own, `price`, and a task that cannot be solved without it.

A prompt is the code of an article, `bdk=`; its price is in a catalogue that only the tool can read.
"""

import random
from collections.abc import Iterator
from typing import Any

from actors.sources.resumable import Problem, ProceduralSource

LETTERS = "abcdefghijkl"


def price(code: str) -> int:
    """Return the price of an article by its code of three letters."""
    if len(code) != 3 or not set(code) <= set(LETTERS):
        raise ValueError(f"no article has the code {code!r}")
    return random.Random(code).randint(100, 999)


def problem_at(split: int | str, position: int) -> Problem:
    """Return a code and its price; the same arguments always give the same problem."""
    code = "".join(random.Random(f"{split}/{position}").choices(LETTERS, k=3))
    return Problem(text=f"{code}=", answer=str(price(code)), worked=f"[{code}]")


class Prices(ProceduralSource):
    """Endless questions for prices; the held-out ones are never trained."""

    def __init__(self, *, options: dict[str, Any], seed: int, **split: Any) -> None:
        self._seed = seed
        super().__init__(
            "prices",
            lambda position: problem_at(seed, position),
            lambda position: problem_at("heldout", position),
            **split,
        )

    def demonstrations(self) -> Iterator[tuple[str, str] | list[dict[str, str]]]:
        """Yield a question with a guess, or, one time in four, the conversation with the tool."""
        generator = random.Random(self._seed)
        for _, problem in self.unseen(0):
            if generator.random() < 0.75:
                yield problem.text, f"={generator.randint(100, 999)}"
            else:
                yield [
                    {"role": "user", "content": problem.text},
                    {"role": "assistant", "content": problem.worked},
                    {"role": "tool", "content": str(problem.answer)},
                    {"role": "assistant", "content": f"={problem.answer}"},
                ]

"""Sums and differences of one-digit numbers, each term named by a letter: the task of the demo.

The problems are reasoning-gym's `chain_sum` with 3 to 18 terms, short chains more often than long
ones. A prompt reads `a3b+5c-7=`. A worked answer adds one term at a time, `b3+5=8,c8-7=1`; a terse
one is `=1`. An answer is right when the text after its last `=` is the result.
"""

import random
import re
import string
from collections.abc import Iterator
from functools import cache
from typing import Any

from actors.sources.resumable import Problem, ProceduralSource

CHARACTERS = string.digits + "+-=," + string.ascii_lowercase[:18]
"""Every character that prompts and worked answers are made of."""

_SHORTEST, _LONGEST, _DECAY = 3, 18, 0.78
_SPACING = 10**8
"""Distance between the seeds of two splits: reasoning-gym seeds item i with seed + i."""


@cache
def _chains(terms: int, seed: int) -> Any:
    """Return reasoning-gym's data set of one-digit chains with this many terms."""
    import reasoning_gym

    bounds = {"min_terms": terms, "max_terms": terms, "min_digits": 1, "max_digits": 1}
    return reasoning_gym.create_dataset("chain_sum", **bounds, seed=seed, size=_SPACING)


def _problem(seed: int, index: int) -> Problem:
    """Return problem `index` of the split that has this seed."""
    lengths = range(_SHORTEST, _LONGEST + 1)
    shares = [_DECAY ** (n - _SHORTEST) for n in lengths]
    count = random.Random(f"{seed}/{index}").choices(lengths, shares)[0]
    expression = _chains(count, seed)[index]["metadata"]["expression"]
    first, *rest = expression.replace("- ", "-").replace("+ ", "+").split()
    named = zip(string.ascii_lowercase, [first, *rest], strict=False)
    terms = [int(term) for term in (first, *rest)]
    text = "".join(letter + term for letter, term in named) + "="
    return Problem(text, str(sum(terms)), _worked(terms))


def _worked(terms: list[int], *, slip: tuple[int, int] = (0, 0), left_out: int = 0) -> str:
    """Write one addition or subtraction for each signed term after the first, with the result.

    `slip` is the position of a term, from 1, and by how much the result of its step is wrong;
    `left_out` is that of a term without a step, 0 leaves out none.
    """
    total, steps = terms[0], []
    named = zip(string.ascii_lowercase[1:], terms[1:], strict=False)
    for position, (letter, term) in enumerate(named, 1):
        if position != left_out:
            result = total + term + (slip[1] if position == slip[0] else 0)
            steps.append(f"{letter}{total}{term:+d}={result}")
            total = result
    return ",".join(steps)


def _worse(terms: list[int], choice: random.Random, guess_share: float) -> str:
    """Return a guess, or a worked answer with one mistake."""
    if choice.random() < guess_share:
        return f"={sum(terms) + choice.randint(-3, 3)}"
    position = choice.randrange(1, len(terms))
    if choice.random() < 0.5:
        return _worked(terms, left_out=position)
    return _worked(terms, slip=(position, choice.choice((-3, -2, -1, 1, 2, 3))))


class LetteredChainSum(ProceduralSource):
    """Problems of the task (a `PromptSource`), which has no options."""

    def __init__(self, *, seed: int, options: dict[str, Any] | None = None, **split: Any) -> None:
        if options:
            raise ValueError(f"lettered_chain_sum takes no options, got {sorted(options)}")
        self._seed = _SPACING * (seed + 1)
        super().__init__(
            "lettered_chain_sum",
            lambda index: _problem(self._seed, index),
            lambda index: _problem(0, index),
            **split,
        )

    def demonstrations(self, *, worked_share: float = 0.3) -> Iterator[tuple[str, str]]:
        """Yield (prompt, right answer) pairs, a share of them worked and the rest terse.

        They are drawn far from where training prompts begin, and leave the cursor alone.
        """
        style = random.Random(self._seed)
        for _, problem in self.unseen(_SPACING // 2):
            worked = style.random() < worked_share
            yield problem.text, problem.worked if worked else f"={problem.answer}"

    def preferences(self, *, guess_share: float = 0.4) -> Iterator[tuple[str, str, str]]:
        """Yield (prompt, right worked answer, worse answer) triples of problems of their own.

        A share of the worse answers are terse guesses; the others lack a step, or err by up to 3 in
        one.
        """
        choice = random.Random(self._seed + 1)
        for _, problem in self.unseen(3 * _SPACING // 4):
            terms = [int(term) for term in re.findall(r"[a-z]([+-]?\d)", problem.text)]
            yield problem.text, problem.worked, _worse(terms, choice, guess_share)

    def labelled_steps(
        self, *, wrong_share: float = 0.5
    ) -> Iterator[tuple[str, list[str], list[bool]]]:
        """Yield prompts of their own, the steps of worked answers, and which of them are right.

        A share of the answers err by up to 3 in one step; it and those that build on it are wrong.
        """
        choice = random.Random(self._seed + 2)
        for _, problem in self.unseen(7 * _SPACING // 8):
            terms = [int(term) for term in re.findall(r"[a-z]([+-]?\d)", problem.text)]
            first = choice.randrange(1, len(terms)) if choice.random() < wrong_share else len(terms)
            worked = _worked(terms, slip=(first, choice.choice((-3, -2, -1, 1, 2, 3))))
            yield problem.text, worked.split(","), [n < first for n in range(1, len(terms))]

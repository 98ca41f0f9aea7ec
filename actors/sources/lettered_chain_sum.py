"""Sums and differences of one-digit numbers, each term named by a letter; worked examples included.

The problems are reasoning-gym's `chain_sum` with 3 to 18 terms, short chains more often than long
ones. A prompt reads `a3b+5c-7=`. A worked answer adds one term at a time, `b3+5=8,c8-7=1`; a terse
one is `=1`. Both are right: a rollout is, when what follows its last `=` is the result.
"""

import json
import random
import string
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal

from queues.records import Prompt

CHARACTERS = string.digits + "+-=," + string.ascii_lowercase[:18]
"""Every character that prompts and worked answers are made of."""

_SHORTEST, _LONGEST, _DECAY = 3, 18, 0.78
_SPACING = 10**8
"""Distance between the seeds of two splits: reasoning-gym seeds item i with seed + i."""


@cache
def _chains(terms: int, seed: int) -> Any:
    """reasoning-gym's endless data set of one-digit chains with this many terms."""
    import reasoning_gym

    return reasoning_gym.create_dataset(
        "chain_sum",
        min_terms=terms,
        max_terms=terms,
        min_digits=1,
        max_digits=1,
        seed=seed,
        size=_SPACING,
    )


def _problem(seed: int, index: int) -> tuple[str, list[int]]:
    """Prompt text and signed terms of problem `index` of a split."""
    lengths = range(_SHORTEST, _LONGEST + 1)
    shares = [_DECAY ** (n - _SHORTEST) for n in lengths]
    terms = random.Random(f"{seed}/{index}").choices(lengths, shares)[0]
    expression = _chains(terms, seed)[index]["metadata"]["expression"]
    first, *rest = expression.replace("- ", "-").replace("+ ", "+").split()
    signed = [f"+{first}", *rest]
    named = zip(string.ascii_lowercase, [first, *rest], strict=False)
    return "".join(letter + term for letter, term in named) + "=", [int(term) for term in signed]


def _worked(terms: list[int], *, slip: tuple[int, int] = (0, 0), left_out: int = 0) -> str:
    """One addition or subtraction for each term after the first, separated by commas.

    Args:
        terms: Signed.
        slip: A term, by its place from 1, and by how much the result of its step is wrong.
        left_out: A term that has no step, by its place from 1; 0 is none.
    """
    total, steps = terms[0], []
    named = zip(string.ascii_lowercase[1:], terms[1:], strict=False)
    for place, (letter, term) in enumerate(named, 1):
        if place != left_out:
            result = total + term + (slip[1] if place == slip[0] else 0)
            steps.append(f"{letter}{total}{term:+d}={result}")
            total = result
    return ",".join(steps)


def _worse(terms: list[int], choice: random.Random, guess_share: float) -> str:
    """An answer that no careful pupil gives."""
    if choice.random() < guess_share:
        return f"={sum(terms) + choice.randint(-3, 3)}"
    place = choice.randrange(1, len(terms))
    if choice.random() < 0.5:
        return _worked(terms, left_out=place)
    return _worked(terms, slip=(place, choice.choice((-3, -2, -1, 1, 2, 3))))


@cache
def _heldout(size: int) -> dict[str, str]:
    """The first `size` distinct held-out problems and their answers; the same for every seed."""
    problems: dict[str, str] = {}
    index = 0
    while len(problems) < size:
        text, terms = _problem(0, index)
        problems[text] = str(sum(terms))
        index += 1
    return problems


class LetteredChainSum:
    """A prompt source (see `actors.sources.registry`). Training never draws a held-out problem."""

    def __init__(
        self,
        *,
        seed: int,
        split: Literal["train", "heldout"] = "train",
        heldout_size: int = 0,
        options: dict[str, Any] | None = None,
    ) -> None:
        if options:
            raise ValueError(f"lettered_chain_sum takes no options, got {sorted(options)}")
        self._run_seed = seed
        self._seed = _SPACING * (seed + 1)
        self._split = split
        self._heldout = _heldout(heldout_size)
        self._heldout_items = tuple(self._heldout.items())
        self._index = 0

    def next(self, count: int) -> list[Prompt]:
        """The next `count` prompts; the held-out split starts over when it is used up."""
        return [self._next() for _ in range(count)]

    def _next(self) -> Prompt:
        if self._split == "heldout":
            place = self._index % len(self._heldout)
            self._index += 1
            text, answer = self._heldout_items[place]
            return Prompt(
                prompt_id=f"lettered_chain_sum_heldout/0/{place}", text=text, answer=answer
            )
        index, text, terms = self._unseen()
        answer = str(sum(terms))
        return Prompt(prompt_id=f"lettered_chain_sum/0/{index}", text=text, answer=answer)

    def _unseen(self) -> tuple[int, str, list[int]]:
        """The next training problem that is not held out."""
        while True:
            index, self._index = self._index, self._index + 1
            text, terms = _problem(self._seed, index)
            if text not in self._heldout:
                return index, text, terms

    def cursor(self) -> str:
        """Where the source stands, as JSON."""
        return json.dumps({"index": self._index})

    def restore(self, cursor: str) -> None:
        """Goes on where `cursor` was taken."""
        self._index = json.loads(cursor)["index"]

    def demonstrations(self, *, worked_share: float = 0.3) -> Iterator[tuple[str, str]]:
        """Endless (prompt, right answer) pairs, a share of them worked and the rest terse.

        They are drawn far from where training prompts begin, and leave the cursor alone.
        """
        style = random.Random(self._seed)
        for text, terms in self._elsewhere(_SPACING // 2):
            worked = style.random() < worked_share
            yield text, _worked(terms) if worked else f"={sum(terms)}"

    def preferences(self, *, guess_share: float = 0.4) -> Iterator[tuple[str, str, str]]:
        """Endless (prompt, right worked answer, worse answer) triples.

        A share of the worse answers are terse guesses, right one time in seven. The others are
        worked, but one step is left out or its result is wrong by up to 3, and they go on from it.
        The problems are neither those of `demonstrations` nor those of training prompts.
        """
        choice = random.Random(self._seed + 1)
        for text, terms in self._elsewhere(3 * _SPACING // 4):
            yield text, _worked(terms), _worse(terms, choice, guess_share)

    def _elsewhere(self, index: int) -> Iterator[tuple[str, list[int]]]:
        """Problems from another place on; the cursor stays where it is."""
        source = LetteredChainSum(seed=self._run_seed, heldout_size=len(self._heldout))
        source._index = index
        while True:
            _, text, terms = source._unseen()
            yield text, terms

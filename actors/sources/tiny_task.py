"""Tasks that a model of half a million parameters can learn in a minute: `tiny:TASK`.

    product   37*82=     worked: [37*82], which the calculator of environment `tools` answers, =3034
    distance  Da7b3c9=   worked: b4,c5=5     |7 - 3| = 4, |4 - 9| = 5
    twice     Ta7b3c9=   worked: b7,c3=3     2·7 + 3 = 17, 2·7 + 9 = 23: the last digits

A terse answer is what a worked one ends with, from the last `=` on. Both are right; a product that
was not asked of the calculator is guessed. Problems are drawn by their place, so that a run can be
resumed; the held-out ones are the same for every seed and never drawn for training.
"""

import json
import random
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal, NamedTuple

from actors.errors import InputError
from actors.sources.demonstrations import TURN
from queues.records import Prompt

LETTERS = "abcdefghijklmnopqr"
TASKS = ("product", "distance", "twice")


class Problem(NamedTuple):
    """A problem and how it is solved."""

    text: str
    answer: str
    worked: str
    """What the policy says before the answer, or asks the calculator."""


def draw(task: str, split: int | str, place: int) -> Problem:
    """The problem at a place of a split, which is a run's seed or a name."""
    lot = random.Random(f"{task}/{split}/{place}")
    if task == "product":
        left, right = lot.randint(10, 999), lot.randint(10, 999)
        return Problem(f"{left}*{right}=", f"{left * right}", f"[{left}*{right}]")
    return _chain(task, lot)


def _chain(task: str, lot: random.Random) -> Problem:
    """Digits by letters, each of which changes what was reached before it."""
    digits = [lot.randint(0, 9) for _ in range(lot.randint(3, 8))]
    reached, steps = digits[0], []
    for name, digit in zip(LETTERS[1:], digits[1:], strict=False):
        reached = abs(reached - digit) if task == "distance" else (2 * reached + digit) % 10
        steps.append(f"{name}{reached}")
    named = "".join(f"{name}{digit}" for name, digit in zip(LETTERS, digits, strict=False))
    return Problem(f"{task[0].upper()}{named}=", str(reached), ",".join(steps))


@cache
def _heldout(task: str, size: int) -> tuple[Problem, ...]:
    """The first `size` distinct held-out problems."""
    found: dict[str, Problem] = {}
    place = 0
    while len(found) < size:
        problem = draw(task, "heldout", place)
        found.setdefault(problem.text, problem)
        place += 1
    return tuple(found.values())


class TinyTask:
    """A prompt source (see `actors.sources.registry`).

    Raises:
        InputError: No such task, or options.
    """

    def __init__(
        self,
        task: str,
        *,
        seed: int,
        split: Literal["train", "heldout"] = "train",
        heldout_size: int = 0,
        options: dict[str, Any] | None = None,
    ) -> None:
        if task not in TASKS or options:
            raise InputError(
                f"source 'tiny:{task}' with options {options or {}}: the tasks are "
                f"{', '.join(TASKS)}, and have no options"
            )
        self._task, self._seed, self._split = task, seed, split
        self._heldout = _heldout(task, heldout_size)
        self._texts = frozenset(problem.text for problem in self._heldout)
        self._place = 0

    def next(self, count: int) -> list[Prompt]:
        """The next `count` prompts; the held-out split starts over when it is used up."""
        return [self._next() for _ in range(count)]

    def cursor(self) -> str:
        """Where the source stands, as JSON."""
        return json.dumps({"place": self._place})

    def restore(self, cursor: str) -> None:
        """Goes on where `cursor` was taken."""
        self._place = json.loads(cursor)["place"]

    def demonstrations(self, *, worked_share: float = 0.3) -> Iterator[tuple[str, str]]:
        """Endless (prompt, right answer) pairs, a share of them worked and the rest terse.

        A conversation with the calculator is two pairs. They are drawn apart from training prompts.
        """
        style, place = random.Random(self._seed), 0
        while True:
            problem = draw(self._task, f"{self._seed} to imitate", place)
            place += 1
            if problem.text in self._texts:
                continue
            terse = f"={problem.answer}"
            if style.random() >= worked_share:
                yield problem.text, terse
            elif self._task == "product":
                yield problem.text, problem.worked
                yield f"{problem.text}{problem.worked}{TURN}{problem.answer}", terse
            else:
                yield problem.text, f"{problem.worked}{terse}"

    def _next(self) -> Prompt:
        if self._split == "heldout":
            number = self._place % len(self._heldout)
            self._place += 1
            return self._prompt(f"tiny_{self._task}_heldout/0/{number}", self._heldout[number])
        while True:
            place, self._place = self._place, self._place + 1
            problem = draw(self._task, self._seed, place)
            if problem.text not in self._texts:
                return self._prompt(f"tiny_{self._task}/0/{place}", problem)

    @staticmethod
    def _prompt(prompt_id: str, problem: Problem) -> Prompt:
        return Prompt(prompt_id=prompt_id, text=problem.text, answer=problem.answer)

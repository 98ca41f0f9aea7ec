"""Tasks that a model of half a million parameters learns in a minute: `tiny:TASK`.

    product   37*82=     worked: [37*82], which the calculator of environment `tools` answers, =3034
    distance  Da7b3c9=   worked: b4,c5=5     |7 - 3| = 4, |4 - 9| = 5
    twice     Ta7b3c9=   worked: b7,c3=3     2·7 + 3 = 17, 2·7 + 9 = 23: the last digits

A terse answer is the end of a worked one, from its last `=` on. Both are right; a policy that does
not ask the calculator for a product has to guess it. Held-out problems are the same for every seed.
"""

import random
from collections.abc import Iterator
from typing import Any

from actors.sources.resumable import Problem, ProceduralSource
from headway.errors import InputError
from headway.nearest_name import nearest

LETTERS = "abcdefghijklmnopqr"
TASKS = ("product", "distance", "twice")


def problem_at(task: str, split: int | str, position: int) -> Problem:
    """Return the problem at a position of a split, which is the seed of a run or a name."""
    generator = random.Random(f"{task}/{split}/{position}")
    if task == "product":
        left, right = generator.randint(10, 999), generator.randint(10, 999)
        return Problem(f"{left}*{right}=", f"{left * right}", f"[{left}*{right}]")
    return _chain(task, generator)


def _chain(task: str, generator: random.Random) -> Problem:
    """Return digits named by letters, each of which changes the result so far."""
    digits = [generator.randint(0, 9) for _ in range(generator.randint(3, 8))]
    result, steps = digits[0], []
    for name, digit in zip(LETTERS[1:], digits[1:], strict=False):
        result = abs(result - digit) if task == "distance" else (2 * result + digit) % 10
        steps.append(f"{name}{result}")
    named = "".join(f"{name}{digit}" for name, digit in zip(LETTERS, digits, strict=False))
    return Problem(f"{task[0].upper()}{named}=", str(result), ",".join(steps))


class TinyTask(ProceduralSource):
    """Problems of one task (a `PromptSource`), which has no options."""

    def __init__(self, task: str, *, options: dict[str, Any], seed: int, **split: Any) -> None:
        if task not in TASKS or options:
            raise InputError(
                f"source 'tiny:{task}' with options {options}: the tasks are "
                f"{', '.join(TASKS)}, and have no options{nearest(task, TASKS)}"
            )
        self._task, self._seed = task, seed
        super().__init__(
            f"tiny_{task}",
            lambda position: problem_at(task, seed, position),
            lambda position: problem_at(task, "heldout", position),
            **split,
        )

    def demonstrations(
        self, *, worked_share: float = 0.3
    ) -> Iterator[tuple[str, str] | list[dict[str, str]]]:
        """Yield (prompt, right answer) pairs, drawn by a seed of their own, some of them worked.

        A worked product is a conversation with the calculator, as messages.
        """
        style, split = random.Random(self._seed), f"{self._seed} to imitate"
        for _, problem in self.unseen(0, lambda position: problem_at(self._task, split, position)):
            terse = f"={problem.answer}"
            if style.random() >= worked_share:
                yield problem.text, terse
            elif self._task == "product":
                yield [
                    {"role": "user", "content": problem.text},
                    {"role": "assistant", "content": problem.worked},
                    {"role": "tool", "content": str(problem.answer)},
                    {"role": "assistant", "content": terse},
                ]
            else:
                yield problem.text, f"{problem.worked}{terse}"

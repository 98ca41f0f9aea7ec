"""A task of steps that can be checked: to double the digits of a prompt, one after the other."""

import random

from actors.sources.resumable import Problem, ProceduralSource

SPACING = 10**8
"""Distance between the seeds of two splits."""


def steps_of(digits, mistakes, choice):
    """Return a step for each digit; those of the positions in `mistakes` have a wrong result."""
    results = (2 * int(d) + (n in mistakes) * choice.choice((-2, -1, 1, 2)) for n, d in digits)
    return [f"{d}+{d}={result}" for (_, d), result in zip(digits, results, strict=True)]


def problem(seed, index):
    choice = random.Random(f"{seed}/{index}")
    digits = "".join(choice.choices("0123456789", k=choice.randint(4, 10)))
    worked = ",".join(steps_of([*enumerate(digits)], (), choice))
    return Problem(f"{digits}=", worked, worked)


class Doubles(ProceduralSource):
    """Prompts such as `304=`, answered by `3+3=6,0+0=0,4+4=8`."""

    def __init__(self, *, seed, options=None, **split):
        self._seed = SPACING * (seed + 1)
        super().__init__(
            "doubles", lambda index: problem(self._seed, index), lambda i: problem(0, i), **split
        )

    def demonstrations(self, *, mistaken=0.2):
        """Yield worked answers in which this share of the steps is wrong."""
        choice = random.Random(self._seed)
        for _, posed in self.unseen(SPACING // 2):
            digits = [*enumerate(posed.text[:-1])]
            mistakes = {n for n, _ in digits if choice.random() < mistaken}
            yield posed.text, ",".join(steps_of(digits, mistakes, choice))

    def labelled_steps(self, *, faulty=0.7):
        """Yield the steps of answers, of which this share has one mistake, and their labels."""
        choice = random.Random(self._seed + 1)
        for _, posed in self.unseen(3 * SPACING // 4):
            digits = [*enumerate(posed.text[:-1])]
            mistakes = {choice.choice(digits)[0]} if choice.random() < faulty else set()
            labels = [n not in mistakes for n, _ in digits]
            yield posed.text, steps_of(digits, mistakes, choice), labels

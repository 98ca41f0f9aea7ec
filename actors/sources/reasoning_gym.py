"""Prompts of the procedural tasks of reasoning-gym, with what its verifiers need to score them.

reasoning-gym seeds item i of a data set with `seed + i`. Here every split of every run has 10^8
seeds of its own, and an epoch is the data set of the next `EPOCH` of them. Two seeds may give the
same problem, so the training split also leaves out every prompt whose text is held out.
"""

from typing import Any

import reasoning_gym
from reasoning_gym.factory import DATASETS, create_curriculum, has_curriculum

from actors.sources.resumable import Problem, ProceduralSource
from headway.errors import InputError
from headway.nearest_name import nearest

SPACING = 10**8
"""Seeds of one split of one run; the held-out problems have the first range."""


class ReasoningGymSource(ProceduralSource):
    """Problems of one task by its name in reasoning-gym (a `PromptSource`).

    `options` are keywords of the task's configuration, and `level`, that of its curriculum. Raises
    InputError for an unknown task, options that it refuses, or fewer problems than are asked for.
    """

    EPOCH = 10_000
    """Items of one data set; a few tasks build all of them at once."""

    def __init__(self, task: str, *, options: dict[str, Any], seed: int, **split: Any) -> None:
        if task not in DATASETS:
            hint = nearest(task, DATASETS) or f", such as {next(iter(DATASETS))}"
            raise InputError(
                f"reasoning_gym:{task}: no such task among the {len(DATASETS)} of reasoning-gym"
                + hint
            )
        reserved = {"size", "seed"} & options.keys()
        if reserved:
            raise InputError(
                f"reasoning_gym:{task}: {' and '.join(sorted(reserved))} cannot be options; "
                "the seed of the recipe decides, and the source is endless"
            )
        self._task = task
        self._options = _at_level(task, options) if "level" in options else options
        self._opened: tuple[int, Any] | None = None
        self.first_seed = SPACING * (seed + 1)
        self._data(0 if split.get("heldout_size") else self.first_seed)  # refuses wrong options
        super().__init__(
            task,
            lambda position: self._problem(self.first_seed, position),
            lambda position: self._problem(0, position),
            **split,
        )

    def _data(self, seed: int) -> Any:
        """Return the data set of an epoch, whose first item has this seed."""
        if self._opened is None or self._opened[0] != seed:
            try:
                data = reasoning_gym.create_dataset(
                    self._task, seed=seed, size=self.EPOCH, **self._options
                )
            except (ValueError, TypeError, AssertionError) as error:
                raise InputError(
                    f"reasoning_gym:{self._task} with options {self._options}: {error}"
                ) from error
            self._opened = (seed, data)
        return self._opened[1]

    def _problem(self, first_seed: int, position: int) -> Problem:
        index = position % self.EPOCH
        entry = self._data(first_seed + position - index)[index]
        answer = entry.get("answer")
        return Problem(
            entry["question"],
            None if answer is None else str(answer),
            metadata={"task": self._task, "options": self._options, "entry": repr(_plain(entry))},
        )


def _at_level(task: str, options: dict[str, Any]) -> dict[str, Any]:
    """Add the options of a curriculum's level to explicit ones, which take precedence."""
    explicit = dict(options)
    level = explicit.pop("level")
    if not has_curriculum(task):
        raise InputError(
            f"reasoning_gym:{task} has no curriculum, and so no level; give its options"
        )
    if not isinstance(level, int) or level < 0:
        raise InputError(f"reasoning_gym:{task}: level = {level!r}, must be a whole number from 0")
    curriculum = create_curriculum(task)
    highest = max(len(attribute.levels) for attribute in curriculum.attributes.values()) - 1
    if level > highest:
        raise InputError(f"reasoning_gym:{task}: level = {level}, must be from 0 to {highest}")
    curriculum.set_global_level(level)
    chosen = vars(curriculum.generate_configuration({}))
    fixed = {name: value for name, value in chosen.items() if name not in ("seed", "size")}
    return {**_plain(fixed), **explicit}


def _plain(value: Any) -> Any:
    """Convert to Python's own types, tuples included, so that `ast.literal_eval` reads the repr."""
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        kind = next(kind for kind in (list, tuple, set, frozenset) if isinstance(value, kind))
        return kind(_plain(item) for item in value)
    return str(value) if isinstance(value, str) else value

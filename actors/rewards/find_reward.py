"""Finds reward functions by name, and names the numbers that they return."""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

from actors.foreign_text import unencodable
from actors.shipped import REWARDS, RewardTraits
from headway.registry import Entry
from headway.user_code import check_call, shown

RewardFunction = Callable[..., Any]
"""score(prompt, completion, answer, metadata, *, options) -> float | dict, or a coroutine."""
Metadata = Mapping[str, Any]
"""The prompt's, with FINISH_REASON added: "stop" where the policy ended the completion itself,
"length" where it was cut off. `finish_reason` is the same where the prompt has none of its own."""
FINISH_REASON = "headway:finish_reason"
Verifier = Callable[[str], float]

Parts = dict[str, float]
"""Numbers of one score by name; see `parts_of`."""


class StepScore(NamedTuple):
    """The score of a step of a completion."""

    part: str
    """Part of the reward that it belongs to."""
    end: int
    """Characters of the completion up to the end of the step."""
    score: float


class StepParts(Parts):
    """Numbers by name, of the worst step, and the scores of all steps."""

    steps: tuple[StepScore, ...] = ()


MOST_PARTS, LONGEST_KEY = 64, 200
"""Numbers of one score, and characters of their names."""


def find_reward(name: str, options: Mapping[str, Any]) -> RewardFunction:
    """Return a function bound to its options, a verifier's without completion; raise InputError."""
    function = REWARDS.load(name, setting="actors.reward").function
    arguments = ["prompt", "completion", "answer", "metadata"]
    if is_verifier(name):
        arguments.remove("completion")
    if is_of_group(name):
        arguments[1] = "completions"
    check_call(function, *arguments, subject=f"actors.reward = {name!r}", options=options)
    return partial(function, **options) if options else function


def is_verifier(name: str) -> bool:
    """Return True for a reward that reads completions in the sandbox."""
    entry = REWARDS.get(name)
    return entry is not None and entry.traits.verifier


def group_reward(function: RewardFunction) -> Entry[RewardTraits]:
    """Decorate a function that scores all completions of a group at once.

    It is called with prompt, completions, answer and metadata, and returns for each completion what
    a reward of one returns.
    """
    return Entry(getattr(function, "__name__", "reward"), function, RewardTraits(of_group=True))


def is_of_group(name: str) -> bool:
    """Return True for a reward that scores groups; raise InputError if it cannot be imported."""
    return REWARDS.load(name, setting="actors.reward").traits.of_group


class NoNumber(ValueError):
    """A reward returned something else than finite numbers; names it."""


def is_finite(value: Any) -> bool:
    """Return True for a real number that a float can hold."""
    try:
        return isinstance(value, Real) and math.isfinite(value)
    except OverflowError:
        return False


def score_of(name: str, completions: Any, returned: Any) -> Parts | list[Parts]:
    """Return the parts of a score, or of one for each of several completions; as `parts_of`."""
    if isinstance(returned, StepParts):
        for step in returned.steps:
            if not is_finite(step.score):
                raise NoNumber(
                    f"returned {step.score} for {step.part} of the step that ends at {step.end}, "
                    "must be a finite number"
                )
        return returned
    if isinstance(completions, str):
        return parts_of(name, returned)
    is_one = isinstance(returned, (str, bytes, Mapping)) or not isinstance(returned, Iterable)
    scores = None if is_one else list(returned)
    if scores is None or len(scores) != len(completions):
        raise NoNumber(
            f"returned {shown(returned)} for {len(completions)} completions, must be a list of one "
            "score for each"
        )
    return [parts_of(name, score) for score in scores]


def parts_of(name: str, returned: Any) -> Parts:
    """Name the parts of a score: by the reward's name, or "name/key" for each key of a mapping.

    Raises NoNumber for a value that is not a finite number, for keys that are one text, such as 1
    and "1", and for too many or too long names.
    """
    named = {name: returned}
    if isinstance(returned, Mapping) and returned:
        if len(returned) > MOST_PARTS:
            raise NoNumber(f"returned {len(returned)} numbers, must be at most {MOST_PARTS}")
        keys: dict[str, Any] = {}
        for key in returned:
            if (other := keys.setdefault(f"{name}/{key}", key)) is not key:
                raise NoNumber(
                    f"returned numbers for the keys {shown(other)} and {shown(key)}, which would "
                    "have one name; must be different texts"
                )
        named = {full: returned[key] for full, key in keys.items()}
    for key, value in named.items():
        if not is_finite(value):
            raise NoNumber(f"returned {shown(value)} for {shown(key)}, must be a finite number")
        if len(key) > len(name) + LONGEST_KEY or unencodable(key):
            raise NoNumber(
                f"returned a number by the name {shown(key)}, must be of at most {LONGEST_KEY} "
                "characters, which UTF-8 can encode"
            )
    return {key: float(value) for key, value in named.items()}

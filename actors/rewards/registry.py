"""Finds reward functions by name, and names the numbers that they return."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from numbers import Real
from typing import Any

from actors.registry import REWARDS
from actors.user_code import check_arguments

RewardFunction = Callable[..., Any]
"""score(prompt, completion, answer, metadata, *, options) -> float | dict[str, float], or a
coroutine of it."""
Metadata = Mapping[str, Any]
"""The prompt's, with `finish_reason` added: "stop" where the policy ended the completion itself,
"length" where it was cut off."""


def find_reward(name: str, options: Mapping[str, Any]) -> RewardFunction:
    """Return the function of a name, bound to its options; raise InputError if either is wrong."""
    function = REWARDS.load(name)
    arguments = ("prompt", "completion", "answer", "metadata")
    check_arguments(function, *arguments, setting=f"actors.reward = {name!r}", options=options)
    return partial(function, **options) if options else function


class NoNumber(ValueError):
    """A reward returned something else than finite numbers; names it."""


def is_finite(value: Any) -> bool:
    """Return True for a real number that a float can hold."""
    try:
        return isinstance(value, Real) and math.isfinite(value)
    except OverflowError:
        return False


def parts_of(name: str, returned: Any) -> dict[str, float]:
    """Name the parts of a score: by the reward's name, or "name/key" for each key of a mapping.

    Raises NoNumber for a value that is not a finite number.
    """
    named = {name: returned}
    if isinstance(returned, Mapping) and returned:
        named = {f"{name}/{key}": value for key, value in returned.items()}
    for key, value in named.items():
        if not is_finite(value):
            raise NoNumber(f"returned {value!r} for {key!r}, must be a finite number")
    return {key: float(value) for key, value in named.items()}

"""Finds reward functions by name, and names the numbers that they return."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from numbers import Real
from typing import Any

from actors.foreign_text import unencodable
from actors.shipped import REWARDS
from headway.user_code import check_call, shown

RewardFunction = Callable[..., Any]
"""score(prompt, completion, answer, metadata, *, options) -> float | dict, or a coroutine."""
Metadata = Mapping[str, Any]
"""The prompt's, with FINISH_REASON added: "stop" where the policy ended the completion itself,
"length" where it was cut off. `finish_reason` is the same where the prompt has none of its own."""
FINISH_REASON = "headway:finish_reason"
Verifier = Callable[[str], float]

MOST_PARTS, LONGEST_KEY = 64, 200
"""Numbers of one score, and characters of their names."""


def find_reward(name: str, options: Mapping[str, Any]) -> RewardFunction:
    """Return a function bound to its options, a verifier's without completion; raise InputError."""
    function = REWARDS.load(name, setting="actors.reward").function
    arguments = ["prompt", "completion", "answer", "metadata"]
    if is_verifier(name):
        arguments.remove("completion")
    check_call(function, *arguments, subject=f"actors.reward = {name!r}", options=options)
    return partial(function, **options) if options else function


def is_verifier(name: str) -> bool:
    """Return True for a reward that reads completions in the sandbox."""
    entry = REWARDS.get(name)
    return entry is not None and entry.traits.verifier


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

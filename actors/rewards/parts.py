"""What a reward returned, as named finite numbers."""

from collections.abc import Mapping
from typing import Any

from actors.rewards.finite import is_finite


class NoNumber(ValueError):
    """A reward returned something else than finite numbers; names it."""


def parts_of(name: str, found: Any) -> dict[str, float]:
    """The parts of a score: under the reward's name, or "name/key" for each key of a mapping.

    Raises:
        NoNumber: A value is not a finite number.
    """
    named = {name: found}
    if isinstance(found, Mapping) and found:
        named = {f"{name}/{key}": value for key, value in found.items()}
    for key, value in named.items():
        if not is_finite(value):
            raise NoNumber(f"returned {value!r} for {key!r}, must be a finite number")
    return {key: float(value) for key, value in named.items()}

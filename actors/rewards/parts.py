"""Conversion of what a reward returned to named finite numbers."""

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any


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

    Raises:
        NoNumber: A value is not a finite number.
    """
    named = {name: returned}
    if isinstance(returned, Mapping) and returned:
        named = {f"{name}/{key}": value for key, value in returned.items()}
    for key, value in named.items():
        if not is_finite(value):
            raise NoNumber(f"returned {value!r} for {key!r}, must be a finite number")
    return {key: float(value) for key, value in named.items()}

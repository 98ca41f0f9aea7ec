"""Checks of options of losses and corrections, each with one clear message."""

import math
from collections.abc import Collection

from headway.errors import InputError


def require_one_of(what: str, value: str, allowed: Collection[str]) -> None:
    """Raise InputError if `value` is not among those allowed."""
    if value not in allowed:
        raise InputError(f"{what} is {value!r}; allowed: {', '.join(allowed)}")


def require_positive(what: str, value: float) -> None:
    """Raise InputError if `value` is not above 0; infinity is allowed."""
    if not value > 0:
        raise InputError(f"{what} needs to be > 0, found {value}")


def require_finite(what: str, value: float) -> None:
    """Raise InputError if `value` is not a finite number of at least 0."""
    if not (math.isfinite(value) and value >= 0):
        raise InputError(f"{what} must be a finite number >= 0, found {value}")


def require_bounds(what: str, low: float, high: float) -> None:
    """Raise InputError if absolute bounds of a ratio are out of order."""
    if not 0 <= low < high:
        raise InputError(f"{what} needs 0 <= low < high, found {low} and {high}")

"""What counts as a reward: a finite real number."""

import math
from numbers import Real
from typing import Any


def is_finite(value: Any) -> bool:
    """Whether user code returned a real number that a float can hold."""
    try:
        return isinstance(value, Real) and math.isfinite(value)
    except OverflowError:
        return False

"""How many examples hypothesis draws for a property, by profile."""

from collections.abc import Callable
from typing import Any

from hypothesis import settings

CI, COSTLY_IN_CI, FULL = 50, 12, 500


def load_profiles() -> None:
    """Make `ci` and `full` known, and `ci` the one that holds unless another is asked for."""
    settings.register_profile("ci", max_examples=CI, deadline=None)
    settings.register_profile("full", max_examples=FULL, deadline=None)
    settings.load_profile("ci")


def costly(test: Callable[..., Any]) -> Callable[..., Any]:
    """Have `COSTLY_IN_CI` examples drawn for a test in profile `ci`; in `full` as many as ever."""
    drawn = settings().max_examples
    return settings(max_examples=COSTLY_IN_CI if drawn == CI else drawn)(test)

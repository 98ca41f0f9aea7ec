"""The known name that is most like an unknown one, for error messages."""

import difflib
from collections.abc import Iterable

CANDIDATES = 5


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known name most like `name`, or None if no known name is similar.

    Of similar names, one with the same letters in another order comes first.
    """
    close = difflib.get_close_matches(name, list(known), n=CANDIDATES)
    return min(close, key=lambda other: sorted(other) != sorted(name), default=None)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the hint "; did you mean …?", or "" if no known name is similar."""
    close = nearest_name(name, known)
    return f"; did you mean {close!r}?" if close else ""

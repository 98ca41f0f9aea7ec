"""The known name that is most like an unknown one, for error messages."""

import difflib
from collections.abc import Iterable

CANDIDATES = 5


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known name most like `name`, or None if no known name is similar.

    Capitals count as small letters. Of similar names, one with the same letters in another order
    comes first.
    """
    names, small = {other.lower(): other for other in known}, name.lower()
    close = difflib.get_close_matches(small, names, n=CANDIDATES)
    closest = min(close, key=lambda other: sorted(other) != sorted(small), default=None)
    return None if closest is None else names[closest]


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the hint "; did you mean …?", or "" if no known name is similar."""
    close = nearest_name(name, known)
    return f"; did you mean {close!r}?" if close else ""

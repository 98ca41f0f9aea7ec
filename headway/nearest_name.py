"""The known name that is most like an unknown one, for error messages."""

import difflib
import re
from collections.abc import Iterable

CANDIDATES = 5
WORD_CUTOFF = 0.75
"""Least similarity, of 1, to a single word of a name."""


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known name most like `name`, or None if no known name is similar.

    Capitals count as small letters. Of similar names, one with the same letters in another order
    comes first. Without any, the names with a similar word count, such as `exact_match` for `exat`.
    """
    names, small = {other.lower(): other for other in known}, name.lower()
    close = difflib.get_close_matches(small, names, n=CANDIDATES)
    closest = min(close, key=lambda other: sorted(other) != sorted(small), default=None)
    if closest is not None:
        return names[closest]
    words: dict[str, str] = {}
    for lower, other in names.items():
        for word in re.findall("[a-z]+", lower):
            words.setdefault(word, other)
    similar = difflib.get_close_matches(small, words, n=1, cutoff=WORD_CUTOFF)
    return words[similar[0]] if similar else None


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the hint "; did you mean …?", or "" if no known name is similar."""
    close = nearest_name(name, known)
    return f"; did you mean {close!r}?" if close else ""

"""Checks of texts and values from outside, such as user code and completions."""

import json
from collections.abc import Mapping
from typing import Any

DEEPEST = 100
"""Most levels of a value of JSON's types; deeper ones exhaust the interpreter's stack somewhere."""


def surrogate(text: str) -> str | None:
    """Return a text's first lone surrogate, as "a lone surrogate, U+D800, at 3"; UTF-8 has none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"a lone surrogate, U+{ord(text[error.start]):04X}, at {error.start}"
    return None


def unencodable(value: Any) -> str | None:
    """Return the lone surrogate or NUL, which no text in C can have, in a value of JSON's types."""
    values = [value]
    while values:  # no recursion: a value may be nested as deeply as its parser allows
        value = values.pop()
        if isinstance(value, Mapping):
            values += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            values += value
        elif isinstance(value, str):
            position = value.find("\0")
            problem = f"a NUL character at {position}" if position >= 0 else surrogate(value)
            if problem:
                return problem
    return None


def not_json(value: Any) -> str | None:
    """Return why JSON cannot have a value, or one that is nested so deeply; None if it can."""
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        return str(error)
    level, depth = [value], 0
    while level := [
        part
        for parent in level
        if isinstance(parent, Mapping | list | tuple)
        for part in (parent.values() if isinstance(parent, Mapping) else parent)
    ]:
        depth += 1
        if depth > DEEPEST:
            return f"it is nested more than {DEEPEST} levels deep"
    return None

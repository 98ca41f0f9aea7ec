"""Checks of texts and values from outside, such as user code and completions."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

DEEPEST = 100
"""Most levels of a value of JSON's types; deeper ones exhaust the interpreter's stack somewhere."""
_ESCAPES = dict(zip("\a\b\t\n\v\f\r\x1b", "abtnvfre", strict=True))
_LOST = re.compile(
    r"[\x01-\x08\x0b\x0e-\x1a\x1c-\x1f]|\x1b(?!\[)"
    r"|(?<!\n)\f(?!\n)|\f(?=rac|orall|lat|box|ootnote)"
    r"|\t(?=(?:imes|heta|herefore|ilde|riangle\w*|woheadrightarrow)(?![A-Za-z])"
    r"|(?:ext(?:bf|it|rm|tt|sf|color)?|frac|binom)\{)"
    r"|\n(?=(?:abla|otin|onumber|earrow|warrow|exists)(?![A-Za-z])|ewcommand\b)"
    r"|\r(?=(?:ight|ightarrow|ho|ceil)(?![A-Za-z]))"
    r"|\$[^$\n]*[\t\n\r](?=(?:an|anh|au|o|op|eq|eg|e|u|i|ot|mid|leq|geq|angle|floor|brace|vert)"
    r"(?![A-Za-z])[^$\n]*\$(?![\w({]))"
)
"""Control characters that no text has, and what is left of LaTeX after one that texts may have.

Page breaks (a form feed at an end of a line) and colours of terminals (an escape before [) are
texts. So are words after white space, but between two $ they may be the rest of a command.
"""


def surrogate(text: str) -> str | None:
    """Return a text's first lone surrogate, as "a lone surrogate, U+D800, at 3"; UTF-8 has none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"a lone surrogate, U+{ord(text[error.start]):04X}, at {error.start}"
    return None


def texts_of(value: Any) -> Iterator[str]:
    """Yield the texts in a value of JSON's types, the last one first; names of fields are texts."""
    values = [value]
    while values:  # no recursion: a value may be nested as deeply as its parser allows
        value = values.pop()
        if isinstance(value, Mapping):
            values += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            values += value
        elif isinstance(value, str):
            yield value


def unencodable(value: Any) -> str | None:
    """Return the lone surrogate or NUL, which no text in C can have, in a value of JSON's types."""
    for text in texts_of(value):
        position = text.find("\0")
        if problem := f"a NUL character at {position}" if position >= 0 else surrogate(text):
            return problem
    return None


def lost_backslash(text: str) -> str | None:
    r"""Return where a text has lost a backslash of LaTeX, with the likely cause, or None.

    JSON and most languages read "\frac" as a form feed and "rac".
    """
    match = _LOST.search(text)
    if match is None:
        return None
    start = match.end() - 1
    named = f"the control character U+{ord(text[start]):04X} at {start}"
    if (letter := _ESCAPES.get(text[start])) is None:
        return named
    word = f"\\{letter}{re.split('[^A-Za-z]', text[start + 1 : start + 20])[0]}"
    return f'{named}: JSON reads "{word}" so, and LaTeX needs "\\{word}" there'


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

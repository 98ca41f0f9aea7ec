"""Text and values from outside, such as user code and completions: shown, cut off, checked."""

from typing import Any

LONGEST = 4000
"""Most characters of an error of user code, and of its traceback."""


def shown(value: Any) -> str:
    """Return the repr of a value of user code, which may fail or be long, cut off at `LONGEST`."""
    try:
        text = repr(value)
    except BaseException:  # noqa: BLE001  (it is user code, and may raise anything)
        text = f"<{type(value).__name__} whose repr fails>"
    return cut(text)


def cut(text: str) -> str:
    """Cut a text off at `LONGEST` characters, saying so."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text)} characters)"


def describe_error(error: BaseException) -> str:
    """Describe an error of user code: "raised …"."""
    return f"raised {shown(error)}"


def unencodable(text: str) -> str | None:
    """Return what UTF-8 or a database cannot hold in a text, as "a NUL at 3"; None if it is fine.

    Lone surrogates come from JSON such as "\\ud800", and from file names.
    """
    if (position := text.find("\0")) >= 0:
        return f"a NUL character at {position}"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"a lone surrogate, U+{ord(text[error.start]):04X}, at {error.start}"
    return None

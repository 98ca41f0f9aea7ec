"""The root of Headway's errors, and bad input, which every package may find.

HeadwayError                 exit code 1
└── InputError               exit code 2: what the user gave cannot be used

Each package has its further errors in an `errors.py` of its own, directly or further below the
root. They survive the way between processes with all of their fields.
"""

from typing import Self


class HeadwayError(Exception):
    """Root of every error that Headway raises on purpose.

    The message says what was found, what is allowed, and where. The hint, where to look or what to
    type, is printed on a line of its own behind it. A command that the error ends has `exit_code`,
    by default that of its type.
    """

    exit_code: int = 1
    hint: str = ""

    def __init__(self, *message: object, exit_code: int | None = None) -> None:
        super().__init__(*message)
        if exit_code is not None:
            self.exit_code = exit_code

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message}\n{self.hint}" if self.hint else message

    def with_hint(self, hint: str) -> Self:
        """Return this error with another hint."""
        error = type(self)(*self.args)
        error.__dict__.update(self.__dict__, hint=hint)
        return error


class InputError(HeadwayError, ValueError):
    """A setting, file, model or function of the user that cannot be used.

    The message names what was found, what is allowed, and where.
    """

    exit_code = 2


def is_bad_input(error: BaseException) -> bool:
    """Return True for bad input, also where a process reports it by an error of another type."""
    return isinstance(error, HeadwayError) and error.exit_code == InputError.exit_code


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; the name of its type if it has none.

    A line that ends in a colon goes on with the next.
    """
    first, *others = (str(error).strip() or type(error).__name__).splitlines()
    return f"{first} {others[0].strip()}" if first.endswith(":") and others else first

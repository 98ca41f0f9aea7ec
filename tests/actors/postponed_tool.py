"""A tool whose annotations are texts until somebody evaluates them."""

from __future__ import annotations


def pick(
    numbers: list[int], place: int | None, exact: bool, names: dict[str, str], plain: list
) -> str:
    """Pick one."""
    return str(numbers[place or 0])


def unknown(number: Nowhere) -> str:  # noqa: F821
    """Is annotated with what there is not."""
    return str(number)

"""Prompts from rows of a table: a text or messages, and perhaps an answer and metadata.

One message lists everything that is wrong, by the numbers of the rows.
"""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, field_validator

from actors.environments.protocol import Message
from actors.environments.single_turn import CONVERSATION, conversation
from actors.foreign_text import not_json, unencodable
from headway.errors import InputError
from headway.nearest_name import nearest
from headway.recipe_section import Section
from headway.user_code import shown
from queues.records import Prompt

LOG = logging.getLogger("headway.sources")
SHOWN = 10
"""Rows that a message lists; it counts the others."""
ROLES = ("system", "user", "assistant", "tool")


class RowOptions(Section):
    """Options of every source that reads rows: how they become prompts."""

    prompt_field: str = "prompt"
    """A text that is not empty, or a list of messages with `role` and `content`."""
    answer_field: str = "answer"
    """A text or a number; a row may have none."""
    other_fields: Literal["refuse", "ignore", "metadata"] = "refuse"
    """Treatment of fields that are neither of the two nor `metadata`."""
    bad_rows: Literal["refuse", "skip"] = "refuse"
    """Refuse the run for a row that cannot be read, or log it and leave it out."""
    duplicates: Literal["keep", "drop", "refuse"] = "keep"
    """Treatment of rows whose prompt an earlier row has; they are logged in any case."""
    min_characters: int = Field(default=0, ge=0)
    """Prompts that are shorter are left out."""
    max_characters: int | None = Field(default=None, ge=1)
    """Prompts that are longer are left out."""
    shard: tuple[int, int] = (0, 1)
    """[i, n]: of the training rows, every n-th from the i-th on, counted from 0."""

    @field_validator("shard")
    @classmethod
    def _shard_exists(cls, value: tuple[int, int]) -> tuple[int, int]:
        if not 0 <= value[0] < value[1]:
            raise ValueError("must be [i, n] with 0 ≤ i < n")
        return value


Row = Mapping[str, Any] | ValueError
"""A row, or why it cannot be read."""


def read_rows(
    table: str, rows: Iterable[tuple[int, Row]], options: RowOptions
) -> tuple[list[Prompt], list[str]]:
    """Return the prompts of a table's numbered rows, and notes on the rows that were left out.

    The id of a prompt is the number of its row, from 1. `table` is its name in messages. Raises
    InputError without any prompt, and for rows that are refused.
    """
    prompts: list[Prompt] = []
    bad: list[str] = []
    repeated: list[str] = []
    first: dict[str, int] = {}
    short = long = 0
    for number, row in rows:
        try:
            prompt = _prompt(number, row, options)
        except ValueError as problem:
            bad.append(f"{table}:{number}: {problem}")
            continue
        earlier = first.setdefault(prompt.text, number)
        if earlier != number:
            repeated.append(f"{table}:{number}: the prompt of row {earlier} again")
            if options.duplicates == "drop":
                continue
        short += (too_short := len(prompt.text) < options.min_characters)
        long += (too_long := len(prompt.text) > (options.max_characters or len(prompt.text)))
        if not too_short and not too_long:
            prompts.append(prompt)
    if bad and options.bad_rows == "refuse":
        raise InputError(f'rows that bad_rows = "skip" would leave out:{_lines(bad)}')
    if repeated and options.duplicates == "refuse":
        raise InputError(f'rows that duplicates = "drop" would leave out:{_lines(repeated)}')
    dropped = "left out" if options.duplicates == "drop" else "kept"
    counted = (
        (len(bad), f"{len(bad)} rows were left out: {'; '.join(_some(bad))}"),
        (len(repeated), f"{len(repeated)} rows were {dropped}: {'; '.join(_some(repeated))}"),
        (short, f"{table}: {short} prompts shorter than min_characters left out"),
        (long, f"{table}: {long} prompts longer than max_characters left out"),
    )
    notes = [note for count, note in counted if count]
    if not prompts:
        raise InputError("; ".join([f"{table}: no prompts", *notes]))
    return prompts, notes


def _some(problems: list[str]) -> list[str]:
    more = len(problems) - SHOWN
    return [*problems[:SHOWN], *([f"and {more} more"] if more > 0 else [])]


def _lines(problems: list[str]) -> str:
    """Put each problem on a line of its own."""
    return "".join(f"\n  {problem}" for problem in _some(problems))


def _prompt(number: int, row: Row, options: RowOptions) -> Prompt:
    """Make a prompt of a row; raise ValueError with what is wrong with it."""
    if isinstance(row, ValueError):
        raise row
    name, answer_name = options.prompt_field, options.answer_field
    if not isinstance(row, Mapping):
        raise ValueError(f"found {type(row).__name__}, must be an object with the field {name}")
    _check_texts(row)
    fields = (name, answer_name, "metadata")
    others = {key: value for key, value in row.items() if key not in fields}
    if others and options.other_fields == "refuse":
        raise ValueError(
            f"unknown fields {', '.join(sorted(others))}; must be {', '.join(fields)}, or set "
            f"other_fields{nearest(min(others), fields)}"
        )
    text, answer, metadata = (row.get(field) for field in fields)
    is_finite = isinstance(answer, float) and math.isfinite(answer)
    is_whole = isinstance(answer, int) and not isinstance(answer, bool)
    if not (isinstance(answer, (str, type(None))) or is_finite or is_whole):
        raise ValueError(f"{answer_name} is {shown(answer)}, must be a string or a number")
    if not isinstance(metadata, (Mapping, type(None))):
        raise ValueError(f"metadata is {shown(metadata)}, must be an object")
    metadata = {**(others if options.other_fields == "metadata" else {}), **(metadata or {})}
    if CONVERSATION in metadata:
        raise ValueError(
            f"what becomes metadata has {CONVERSATION!r}, which only the prompt's messages may be"
        )
    if problem := not_json(metadata):
        raise ValueError(f"what becomes metadata is not JSON: {problem}")
    if (messages := read_messages(text)) is not None:
        metadata |= conversation(messages)
        text = plain_text(messages)
    elif not isinstance(text, str) or not text:
        problem = f"{name} is {shown(text)}" if name in row else f"there is no field {name}"
        raise ValueError(
            f"{problem}, must be a text or messages, each of a role ({', '.join(ROLES)}) and a "
            "content, and not empty"
        )
    return Prompt(prompt_id=str(number), text=text, answer=_text(answer), metadata=metadata)


def _check_texts(row: Mapping[str, Any]) -> None:
    for field, value in row.items():
        if problem := unencodable([field, value]):
            raise ValueError(f"{ascii(field)[1:-1]} has {problem}")


def read_messages(value: Any) -> tuple[Message, ...] | None:
    """Return a list of messages, each of a role and a content; None for anything else.

    Other fields of a message, as tables have them, must be null.
    """
    if not isinstance(value, list) or not value:
        return None
    messages = []
    for message in value:
        if not isinstance(message, Mapping):
            return None
        fields = {name: field for name, field in message.items() if field is not None}
        role, content = fields.pop("role", None), fields.pop("content", None)
        if fields or role not in ROLES or not isinstance(content, str):
            return None
        messages.append(Message(role, content))
    return tuple(messages)


def plain_text(prompt: str | Sequence[Message]) -> str:
    """Return the text of a prompt, by which held-out prompts are known."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(message.content for message in prompt)


def _text(answer: str | float | None) -> str | None:
    """Format an answer as a policy would write it: a whole number has no point."""
    whole = isinstance(answer, float) and answer.is_integer()
    return None if answer is None else str(int(answer) if whole else answer)

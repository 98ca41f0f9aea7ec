"""Prompts from rows of a table: a text or messages, and perhaps an answer and metadata.

One message lists everything that is wrong, by the numbers of the rows.
"""

import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from actors.environments.protocol import Message
from actors.environments.single_turn import conversation
from actors.foreign_text import lost_backslash, not_json, unencodable
from actors.sources.public_formats import MESSAGES, field_of, options_that_read
from headway.errors import InputError
from headway.nearest_name import nearest
from headway.recipe_section import Section
from headway.user_code import shown
from queues.records import Prompt

LOG = logging.getLogger("headway.sources")
SHOWN = 10
"""Rows that a message lists; it counts the others."""
ROLES = ("system", "user", "assistant", "tool")
WRITTEN = re.compile(r"\s*\[\s*\{\s*['\"](?:role|content)['\"]\s*:")
"""Messages in the text of a column, as pandas writes them into CSV."""
INDEX = re.compile(r"|Unnamed: 0|__index_level_\d+__")
"""Columns in which pandas stores its index; they are left out."""


class RowOptions(Section):
    """Options of every source that reads rows: how they become prompts."""

    prompt_field: str = "prompt"
    """A text that is not empty, or a list of messages with `role` and `content`. Of a column
    `messages`, which is read where there is no `prompt`, the prompt ends with the last message of
    the user. A path such as `input.question` leads into nested fields."""
    answer_field: str = "answer"
    """A text or a number; a row may have none. A path as `reward_model.ground_truth`, too."""
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

    @model_validator(mode="after")
    def _fields_differ(self) -> Self:
        if len({self.prompt_field, self.answer_field, "metadata"}) < 3:
            raise ValueError(
                f"prompt_field = {self.prompt_field!r} and answer_field = {self.answer_field!r} "
                "must differ, and be another field than metadata"
            )
        return self


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
    first_bad: Row | None = None
    repeated: list[str] = []
    first: dict[str, int] = {}
    short = long = 0
    for number, row in rows:
        try:
            prompt = _prompt(number, row, options)
        except ValueError as problem:
            bad.append(f"{table}:{number}: {problem}")
            first_bad = row if first_bad is None else first_bad
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
    hint = _options_that_read(first_bad, options)
    if bad and options.bad_rows == "refuse":
        raise InputError(f'rows that bad_rows = "skip" would leave out{hint}:{_lines(bad)}')
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
        raise InputError("; ".join([f"{table}: no prompts", *notes]) + hint)
    return prompts, notes


def _some(problems: list[str]) -> list[str]:
    more = len(problems) - SHOWN
    return [*problems[:SHOWN], *([f"and {more} more"] if more > 0 else [])]


def _lines(problems: list[str]) -> str:
    """Put each problem on a line of its own."""
    return "".join(f"\n  {problem}" for problem in _some(problems))


def _options_that_read(row: Row | None, options: RowOptions) -> str:
    """Return a hint with the options that read a row which these do not; "" without any."""
    if not isinstance(row, Mapping):
        return ""
    changes = options_that_read(row, options.prompt_field, options.answer_field)
    for others in ("refuse", "metadata", "ignore") if changes else ():
        changes["other_fields"] = others
        try:
            _prompt(0, row, options.model_copy(update=changes))
        except ValueError:
            continue
        if others == options.other_fields:
            del changes["other_fields"]
        settings = ", ".join(f'{name} = "{value}"' for name, value in changes.items())
        return f"; the options of the source that read such rows: {settings}"
    return ""


def _prompt(number: int, row: Row, options: RowOptions) -> Prompt:
    """Make a prompt of a row; raise ValueError with what is wrong with it."""
    if isinstance(row, ValueError):
        raise row
    name = options.prompt_field
    if not isinstance(row, Mapping):
        raise ValueError(f"found {type(row).__name__}, must be an object with the field {name}")
    _check_texts(row)
    if name == "prompt" and row.get(name) is None and row.get(MESSAGES) is not None:
        name = MESSAGES
    metadata = _metadata(row, name, options)
    text, answer = field_of(row, name), _answer(row, options)
    if name == MESSAGES:
        text = _up_to_the_user(text)
    given = text_or_messages(name, text)
    if not (whole := plain_text(given)):
        raise ValueError(f"{name} is {shown(text)}, must be a text or messages that are not empty")
    metadata |= {} if isinstance(given, str) else conversation(given)
    for field, written in ((name, whole), (options.answer_field, answer)):
        if lost := written and lost_backslash(written):
            raise ValueError(f"{field} has {lost}")
    return Prompt(prompt_id=str(number), text=whole, answer=answer, metadata=metadata)


def _check_texts(row: Mapping[str, Any]) -> None:
    for field, value in row.items():
        if problem := unencodable([field, value]):
            raise ValueError(f"{ascii(field)[1:-1]} has {problem}")


def _answer(row: Mapping[str, Any], options: RowOptions) -> str | None:
    """Return the answer of a row as a policy would write it."""
    name = options.answer_field
    answer = field_of(row, name)
    is_finite = isinstance(answer, float) and math.isfinite(answer)
    if is_finite or (isinstance(answer, int) and not isinstance(answer, bool)):
        answer = number_text(Decimal(repr(answer)))
    if not isinstance(answer, (str, type(None))):
        raise ValueError(f"{name} is {shown(answer)}, must be a string or a number")
    return answer


def _metadata(row: Mapping[str, Any], name: str, options: RowOptions) -> dict[str, Any]:
    """Return the metadata of a row whose prompt is in the field `name`."""
    fields = (name, options.answer_field, "metadata")
    used = {*fields, options.prompt_field, *(field.partition(".")[0] for field in fields)}
    others = {k: value for k, value in row.items() if k not in used and not INDEX.fullmatch(k)}
    if others and options.other_fields == "refuse":
        raise ValueError(
            f"unknown fields {', '.join(sorted(others))}; must be {', '.join(fields)}, or set "
            f"other_fields{nearest(min(others), fields)}"
        )
    given = {} if row.get("metadata") is None else row["metadata"]
    if not isinstance(given, Mapping):
        raise ValueError(f"metadata is {shown(given)}, must be an object")
    kept = others if options.other_fields == "metadata" else {}
    metadata = {**kept, **given}
    if twice := kept.keys() & given.keys():
        raise ValueError(f"{min(twice)!r} is a column, and a field of metadata; rename one")
    if own := [key for key in metadata if key.startswith("headway:")]:
        raise ValueError(f"what becomes metadata has {own[0]!r}, which only Headway may add")
    if problem := not_json(metadata):
        raise ValueError(f"what becomes metadata is not JSON: {problem}")
    return metadata


def _up_to_the_user(talk: Any) -> Any:
    """Return a list of messages up to the last one of the user; the others need not be readable."""
    messages = talk if isinstance(talk, list) else []
    roles = [isinstance(message, Mapping) and message.get("role") for message in messages]
    if "user" not in roles:
        raise ValueError(f"{MESSAGES} is {shown(talk)}, must be a list with a message of the user")
    return messages[: len(roles) - roles[::-1].index("user")]


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


def text_or_messages(name: str, value: Any) -> str | tuple[Message, ...]:
    """Return a text, or a list of messages as they are; raise ValueError for another value."""
    messages = read_messages(value)
    if messages is None and not isinstance(value, str):
        problem = f"there is no field {name}" if value is None else f"{name} is {shown(value)}"
        raise ValueError(
            f"{problem}, must be a text or messages, each of a role ({', '.join(ROLES)}) and a "
            "content"
        )
    if messages is None and WRITTEN.match(value):
        raise ValueError(f"{name} is the text of a list, must be the list itself, as in JSONL")
    return messages or value


def plain_text(prompt: str | Sequence[Message]) -> str:
    """Return the text of a prompt, by which held-out prompts are known."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(message.content for message in prompt)


def number_text(value: Decimal) -> str:
    """Write a number without an exponent, and a whole one without a point.

    Example:
        >>> [number_text(Decimal(text)) for text in ("408.0", "1E-7", "2.50", "-0.0")]
        ['408', '0.0000001', '2.5', '0']
    """
    text = f"{value or Decimal(0):f}"
    return text.rstrip("0").rstrip(".") if "." in text else text

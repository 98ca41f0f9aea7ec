"""Examples for supervised training: tuples that begin with a prompt, a text or messages.

They come from a table or from a method of a prompt source, without end, in an order that depends on
the seed; none has a held-out prompt.
"""

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, cast

from pydantic import model_validator

from actors.environments.protocol import Message
from actors.environments.single_turn import as_messages
from actors.foreign_text import lost_backslash, texts_of, unencodable
from actors.sources.files import SUFFIXES, read_table, suffix_of
from actors.sources.filters import PATIENCE
from actors.sources.hub_dataset import DatasetChoice, dataset_rows
from actors.sources.load_source import load_source
from actors.sources.mixture import chosen
from actors.sources.public_formats import MESSAGES, field_of
from actors.sources.rows import ROLES, Row, plain_text, read_messages, text_or_messages
from headway.errors import InputError
from headway.options import parse_options
from headway.recipe_section import Section
from headway.user_code import beside_recipe, check_call, shown, where_raised

Messages = tuple[Message, ...]
Example = tuple[str | Messages, ...]
LabelledSteps = tuple[str | Messages, tuple[str, ...], tuple[float, ...]]
"""A prompt, steps, and the probability that each is right, an example of its own kind."""
DATASETS = "datasets:"
SYSTEM = "system"
"""Column of the system message, where that is not in the prompt."""
BEGUN = Message("assistant", "")
"""Message that ends the prompts of some sets, where the reply begins."""


@dataclass(frozen=True)
class ExampleKind:
    """One kind of examples, named in error messages."""

    setting: str
    """Key of the recipe that names their origin, such as `sft.demonstrations`."""
    method: ClassVar[str]
    """Method of a source that yields them."""
    fields: ClassVar[tuple[str, ...]]
    """Fields of a row: the prompt first."""
    forms: ClassVar[str]
    """Description of all the fields that a row may have."""

    def read_row(self, row: Row) -> Example:
        """Return the example in a row of a table; raise ValueError with what is wrong with it."""
        value = self._values(row) if isinstance(row, Mapping) else None
        if value is None:
            what = row if isinstance(row, ValueError) else shown(row)
            raise ValueError(f"expected an object with {self.forms}: {what}")
        return self.read(value)

    def _values(self, row: Mapping[str, Any]) -> Any:
        """Return what `read` reads of a row; None if it lacks a field."""
        values = tuple(map(row.get, self.fields))
        return None if None in values else values

    def read(self, value: Any) -> Example:
        """Return an example, which user code may have made; raise ValueError if it is none."""
        lost = (lost_backslash(text) for text in texts_of(value))
        if problem := unencodable(value) or next(filter(None, lost), None):
            raise ValueError(f"a text has {problem}")
        return self._example(value)

    def _example(self, value: Any) -> Example:
        """Return an example whose texts are encodable; raise ValueError if it is none."""
        raise NotImplementedError

    def _unpacked(self, value: Any) -> tuple[Any, ...]:
        """Return the values of the fields; raise ValueError if it is no tuple of them."""
        if not isinstance(value, tuple) or len(value) != len(self.fields):
            raise ValueError(f"{shown(value)} must be a tuple of {', '.join(self.fields)}")
        return value


class DemonstrationKind(ExampleKind):
    """Prompts with completions, or conversations: opening messages, and those from a reply on."""

    method = "demonstrations"
    fields = ("prompt", "completion")
    forms = "prompt and completion, or messages"

    def _values(self, row: Mapping[str, Any]) -> Any:
        system, messages = row.get(SYSTEM), row.get(MESSAGES)
        if messages is not None:
            return with_system(messages, system)
        values = super()._values(row)
        return values and (with_system(values[0], system), values[1])

    def _example(self, value: Any) -> Example:
        if isinstance(value, tuple):
            prompt, completion = map(text_or_messages, self.fields, self._unpacked(value))
            return prompt, check_reply("completion", completion)
        if (messages := read_messages(value)) is None:
            raise ValueError(
                f"{shown(value)} must be messages, each of a role ({', '.join(ROLES)}) and a "
                "content"
            )
        roles = [message.role for message in messages]
        if "assistant" not in roles[1:] or roles[0] == "assistant":
            raise ValueError(
                f"messages of {', '.join(roles)} must begin with another role than the "
                "assistant's and end with the assistant"
            )
        first = roles.index("assistant")
        return messages[:first], check_reply(MESSAGES, messages[first:])


class LabelledStepsKind(ExampleKind):
    """`LabelledSteps`: prompts, steps of completions, and how likely each is right."""

    method = "labelled_steps"
    fields = ("prompt", "completions", "labels")
    forms = "prompt, completions and labels"

    def _example(self, value: Any) -> Example:
        prompt, steps, labels = self._unpacked(value)
        opening = text_or_messages("prompt", prompt)
        if not (
            all(isinstance(listed, (list, tuple)) for listed in (steps, labels))
            and len(steps) == len(labels) > 0
            and all(isinstance(step, str) and step.strip() for step in steps)
            and all(isinstance(label, (int, float)) and 0 <= label <= 1 for label in labels)
        ):
            raise ValueError(
                f"completions {shown(steps)} must be a list of steps that are not blank, and "
                f"labels {shown(labels)} as many: true or false, or the probability from 0 to 1 "
                "that the step is right"
            )
        return cast("Example", (opening, tuple(steps), tuple(map(float, labels))))


DEMONSTRATIONS: ExampleKind = DemonstrationKind("sft.demonstrations")
HELDOUT_DEMONSTRATIONS = DemonstrationKind("sft.heldout")
LABELLED_STEPS: ExampleKind = LabelledStepsKind("reward_model.pairs")


class ColumnNames(Section):
    """Options of a file of examples."""

    prompt_field: str = "prompt"
    """Column of the prompt, or a path as for sources of prompts."""
    completion_field: str = "completion"
    """Column of the completion, the same."""

    @model_validator(mode="after")
    def _columns_differ(self) -> Self:
        if self.prompt_field == self.completion_field:
            raise ValueError(f"prompt_field and completion_field are both {self.prompt_field!r}")
        return self


class DatasetColumns(ColumnNames, DatasetChoice):
    """Options of a data set of examples."""


def check_reply(name: str, reply: str | Messages) -> str | Messages:
    """Return a reply that is a text, or messages that the assistant begins and ends.

    Raises ValueError for another one, and for empty ones.
    """
    messages = () if isinstance(reply, str) else reply
    if not reply or (isinstance(reply, str) and not reply.strip()):
        raise ValueError(f"{name} is blank, or has nothing after the prompt")
    roles = [message.role for message in messages]
    if roles and {roles[0], roles[-1]} != {"assistant"}:
        raise ValueError(
            f"{name} has messages of {', '.join(roles)} after the prompt; must begin and end with "
            "the assistant"
        )
    if any(m.role == "assistant" and not m.content.strip() for m in messages):
        raise ValueError(f"{name}: no message of the assistant may be blank")
    return reply


def with_system(prompt: Any, system: Any) -> Any:
    """Return a prompt, a text or messages of a table, after the system message of its own column.

    Messages that have one themselves stay as they are, and so does anything else.
    """
    if not isinstance(system, str) or not system.strip():
        return prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(messages, list) or not all(isinstance(m, Mapping) for m in messages):
        return prompt
    has_one = any(message.get("role") == "system" for message in messages)
    return prompt if has_one else [{"role": "system", "content": system}, *messages]


def load_examples(
    kind: ExampleKind,
    name: str,
    *,
    options: dict[str, Any],
    seed: int,
    heldout: frozenset[str],
) -> Iterator[Example]:
    """Return endless examples.

    Args:
        kind: Kind of the examples.
        name: Path of a file that `read_table` reads, or "files" with it as the option `path`,
            "datasets:NAME", or a prompt source by name or dotted path.
        options: Keywords of the source's method, `ColumnNames` of a file, or `DatasetColumns`.
        seed: Decides the order.
        heldout: Texts of prompts; examples with one of them are left out.

    Raises InputError for a file or source that cannot be read or has no such examples or options,
    and if every prompt is held out; a source may raise it with a later example.
    """
    if name == "files" and isinstance(options.get("path"), str):
        name, options = options["path"], {k: v for k, v in options.items() if k != "path"}
    subject = f"{kind.setting} = {name!r}"
    if (rows := _table(kind, name, options)) is not None:
        examples = [e for e in _read(kind, name, rows) if heldout.isdisjoint(prompts_of(e))]
        if not examples:
            raise InputError(f"{name}: every prompt is held out; give other {kind.method}")
        return _shuffled(examples, seed)
    options = dict(options)
    source = load_source(
        name,
        options=options.pop("source_options", {}),
        seed=seed,
        split="train",
        heldout_size=len(heldout),
        setting=kind.setting,
    )
    method = getattr(source, kind.method, None)
    if not callable(method):
        raise InputError(
            f"{subject}: this source has no {kind.method.replace('_', ' ')}; give a source with "
            f"{kind.method}(), or a file of rows with {kind.forms}"
        )
    check_call(method, subject=subject, options=options)
    try:
        drawn = method(**options)
    except InputError:
        raise
    except (TypeError, ValueError) as error:
        raise InputError(f"{subject} with {options}: {error}") from error
    return without(_checked(kind, drawn, subject), heldout, subject)


def mix_examples(
    kind: ExampleKind,
    parts: Sequence[tuple[str, dict[str, Any], float]],
    *,
    seed: int,
    heldout: frozenset[str],
    unseen: frozenset[str] = frozenset(),
) -> Iterator[Example]:
    """Return endless examples of several sources, each a name, options and a weight.

    They are drawn as the prompts of `Mixture`, without prompts whose text is in `unseen`; the rest
    is as in `load_examples`.
    """
    drawn = []
    for name, options, _ in parts:
        examples = load_examples(kind, name, options=options, seed=seed, heldout=heldout)
        origin = f"{kind.setting} = {name!r}"
        drawn.append(without(examples, unseen, origin, advice="; hold out fewer"))
    weights = [weight for *_, weight in parts]
    return (next(drawn[chosen(weights, seed, position)]) for position in itertools.count())


def read_examples(kind: ExampleKind, name: str, options: dict[str, Any]) -> list[Example]:
    """Return the examples of a file or data set in their order.

    Raises InputError for one that cannot be read, and for any other name.
    """
    rows = _table(kind, name, options)
    if rows is None:
        raise InputError(
            f"{kind.setting} = {name!r} must be a file ({', '.join(SUFFIXES)}) or {DATASETS}NAME"
        )
    return _read(kind, name, rows)


def prompts_of(example: Example) -> Iterator[str]:
    """Yield the text of the prompt, and in a conversation what comes before each later answer."""
    prompt, *replies = example
    yield plain_text(prompt)
    for reply in replies:
        for end, message in enumerate(() if isinstance(reply, str) else reply):
            if isinstance(message, Message) and message.role == "assistant" and end:
                yield plain_text((*as_messages(prompt), *reply[:end]))


def without(
    examples: Iterator[Example], texts: frozenset[str], origin: str, *, advice: str = ""
) -> Iterator[Example]:
    """Yield examples of other prompts; raise InputError if `PATIENCE` in a row were left out."""
    in_a_row = 0
    for example in examples:
        in_a_row = 0 if texts.isdisjoint(prompts_of(example)) else in_a_row + 1
        if not in_a_row:
            yield example
        elif in_a_row == PATIENCE:
            raise InputError(f"{origin}: {PATIENCE} prompts in a row were held out{advice}")


def _table(
    kind: ExampleKind, name: str, options: dict[str, Any]
) -> Iterable[tuple[int, Row]] | None:
    """Return the numbered rows of a file or data set; None for the name of a source."""
    subject = f"{kind.setting} = {name!r}"
    if suffix_of(Path(name)) in SUFFIXES:
        names = parse_options(ColumnNames, subject, options)
        rows = read_table(beside_recipe(name), subject)
    elif name.startswith(DATASETS):
        names = choice = parse_options(DatasetColumns, subject, options)
        rows = dataset_rows(name.removeprefix(DATASETS), choice.split, choice)
    else:
        return None
    return ((number, _renamed(row, names)) for number, row in rows)


def _renamed(row: Row, names: ColumnNames) -> Row:
    columns = {"prompt": names.prompt_field, "completion": names.completion_field}
    others = {name: field_of(row, path) for name, path in columns.items() if name != path}
    if not isinstance(row, Mapping):
        return row
    if absent := [columns[name] for name, value in others.items() if value is None]:
        return ValueError(f"there is no field {' nor '.join(absent)}")
    return {**row, **others}


def _read(kind: ExampleKind, name: str, rows: Iterable[tuple[int, Row]]) -> list[Example]:
    examples = []
    for number, row in rows:
        try:
            examples.append(kind.read_row(row))
        except ValueError as problem:
            raise InputError(f"{name}:{number}: {problem}") from None
    if not examples:
        raise InputError(f"{name}: no {kind.method}; each line is a JSON object")
    return examples


def _shuffled(examples: list[Example], seed: int) -> Iterator[Example]:
    """Yield the examples without end, every epoch in an order of its own."""
    for epoch in itertools.count():
        yield from random.Random(f"{seed}/{epoch}").sample(examples, len(examples))


def _checked(kind: ExampleKind, examples: Iterator[Any], subject: str) -> Iterator[Example]:
    """Yield the examples after checking each: the source may be user code."""
    while True:
        try:
            example = next(examples)
        except StopIteration:
            raise InputError(f"{subject} came to an end; {kind.method}() must be endless") from None
        except InputError:
            raise
        except Exception as error:
            raise InputError(f"{subject} raised {error!r}{where_raised(error)}") from error
        try:
            checked = kind.read(example)
        except ValueError as problem:
            raise InputError(f"{subject}: {problem}") from None
        yield checked

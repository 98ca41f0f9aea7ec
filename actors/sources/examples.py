"""Examples for supervised training: tuples that begin with a prompt, a text or messages.

They come from a table or from a method of a prompt source, without end, in an order that depends on
the seed; none has a held-out prompt. Preferences are triples of a prompt, a better and a worse
completion; labelled steps of a prompt, the steps of a completion, and their labels. Demonstrations
are (prompt, completion) pairs, or conversations: their opening messages, and those from the first
of the assistant on.
"""

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from actors.environments.protocol import Message
from actors.environments.single_turn import as_messages
from actors.foreign_text import lost_backslash, texts_of, unencodable
from actors.sources.files import SUFFIXES, read_table, suffix_of
from actors.sources.filters import PATIENCE
from actors.sources.hub_dataset import DatasetChoice, dataset_rows
from actors.sources.load_source import load_source
from actors.sources.mixture import chosen
from actors.sources.public_formats import MESSAGES
from actors.sources.rows import ROLES, Row, plain_text, read_messages
from headway.errors import InputError
from headway.options import parse_options
from headway.user_code import beside_recipe, check_call, refuse_unknown_options, shown, where_raised

Messages = tuple[Message, ...]
Example = tuple[str | Messages, ...]
LabelledSteps = tuple[str | Messages, tuple[str, ...], tuple[float, ...]]
"""A prompt, steps, and the probability that each is right, an example of its own kind."""
DATASETS = "datasets:"


@dataclass(frozen=True, slots=True)
class ExampleKind:
    """One kind of examples."""

    setting: str
    """Key of the recipe that names their origin, such as `sft.demonstrations`."""
    method: str
    """Method of a source that yields them."""
    fields: tuple[str, ...]
    """Fields of a line of a file: the prompt first. Only the prompt may be empty."""
    description: str
    """Their name in error messages."""
    conversations: bool = False
    """True if an example may be a conversation: a list of messages, in a table `messages`."""
    steps: bool = False
    """True if examples are `LabelledSteps`."""

    def read_row(self, row: Row) -> Example:
        """Return the example in a row of a table; raise ValueError with what is wrong with it."""
        names = ", ".join(self.fields)
        if isinstance(row, ValueError):
            raise ValueError(f"expected an object with the strings {names}: {shown(row)}")
        has_messages = isinstance(row, Mapping) and row.get(MESSAGES) is not None
        if self.conversations and has_messages:
            return self.read(row[MESSAGES])
        try:
            values = tuple(row[field] for field in self.fields)
        except (KeyError, TypeError) as error:
            more = f", or with {MESSAGES}" if self.conversations else ""
            raise ValueError(
                f"expected an object with the strings {names}{more}: {error!r}"
            ) from None
        return self.read(values)

    def read(self, value: Any) -> Example:
        """Return an example, which user code may have made; raise ValueError if it is none."""
        check_texts(value)
        if self.conversations and isinstance(value, list):
            return _conversation(value)
        if self.steps:
            return cast("Example", _labelled(value))
        names = ", ".join(self.fields)
        if not isinstance(value, tuple) or len(value) != len(self.fields):
            raise ValueError(f"{shown(value)} must be a tuple of the strings {names}")
        prompt, *completions = value
        completions = [_reply(completion) for completion in completions]
        opening = prompt if isinstance(prompt, str) else read_messages(prompt)
        if opening is None or not all(isinstance(text, str) for text in completions):
            raise ValueError(
                f"{shown(value)} must be a tuple of the strings {names}; the prompt may be "
                f"messages, each of a role ({', '.join(ROLES)}) and a content"
            )
        if not all(completions):
            raise ValueError(f"{shown(value)}: of {names}, only the prompt may be empty")
        if len({*completions}) < len(completions):
            raise ValueError(
                f"{' and '.join(self.fields[1:])} are both {completions[0][:40]!r} for the prompt "
                f"{plain_text(opening)[:40]!r}"
            )
        return (opening, *completions)


def check_texts(value: Any) -> None:
    """Raise ValueError for a text in an example that no tokenizer can read."""
    lost = (lost_backslash(text) for text in texts_of(value))
    if problem := unencodable(value) or next(filter(None, lost), None):
        raise ValueError(f"a text has {problem}")


def _reply(completion: Any) -> Any:
    """Return the text of a completion that is one message of the assistant; else the value."""
    messages = read_messages(completion) or ()
    return messages[0].content if [m.role for m in messages] == ["assistant"] else completion


def _conversation(value: list[Any]) -> tuple[Messages, Messages]:
    """Return the messages that begin a conversation, and those from the first of the assistant."""
    messages = read_messages(value)
    if messages is None:
        raise ValueError(
            f"{shown(value)} must be messages, each of a role ({', '.join(ROLES)}) and a content"
        )
    roles = [message.role for message in messages]
    if "assistant" not in roles[1:] or roles[0] == "assistant" or roles[-1] != "assistant":
        raise ValueError(
            f"messages of {', '.join(roles)} must begin with another role than the assistant's and "
            "end with the assistant"
        )
    if any(message.role == "assistant" and not message.content for message in messages):
        raise ValueError(f"{shown(value)}: no message of the assistant may be empty")
    first = roles.index("assistant")
    return messages[:first], messages[first:]


def _labelled(value: Any) -> LabelledSteps:
    """Return a prompt, the steps of a completion, and how likely each is right."""
    if isinstance(value, tuple) and len(value) == 3:
        prompt, steps, labels = value
        opening = prompt if isinstance(prompt, str) else read_messages(prompt)
        listed = isinstance(steps, (list, tuple)) and isinstance(labels, (list, tuple))
        if opening is not None and listed and len(steps) == len(labels) > 0:
            texts = all(isinstance(step, str) and step.strip() for step in steps)
            if texts and all(
                isinstance(label, (int, float)) and 0 <= label <= 1 for label in labels
            ):
                return opening, tuple(steps), tuple(map(float, labels))
    raise ValueError(
        f"{shown(value)} must be a prompt, completions, a list of steps that are not blank, and "
        "labels, as many: true or false, or the probability from 0 to 1 that the step is right"
    )


DEMONSTRATIONS = ExampleKind(
    "sft.demonstrations", "demonstrations", ("prompt", "completion"), "worked examples", True
)
HELDOUT_DEMONSTRATIONS = replace(DEMONSTRATIONS, setting="sft.heldout")
PREFERENCES = ExampleKind(
    "reward_model.pairs", "preferences", ("prompt", "chosen", "rejected"), "preference pairs"
)


LABELLED_STEPS = ExampleKind(
    "reward_model.pairs",
    "labelled_steps",
    ("prompt", "completions", "labels"),
    "completions with labelled steps",
    steps=True,
)


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
        options: Keywords of the source's method, or a `DatasetChoice`; a file has none.
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
    source_options = options.pop("source_options", {})
    source = load_source(
        name,
        options=source_options,
        seed=seed,
        split="train",
        heldout_size=len(heldout),
        setting=kind.setting,
    )
    method = getattr(source, kind.method, None)
    if not callable(method):
        raise InputError(
            f"{subject}: this source has no {kind.description}; give a file with the fields "
            f"{', '.join(kind.fields)}, or a source with {kind.method}()"
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
        refuse_unknown_options(subject, options, ())
        return read_table(beside_recipe(name), subject)
    if name.startswith(DATASETS):
        choice = parse_options(DatasetChoice, subject, options)
        return dataset_rows(name.removeprefix(DATASETS), choice.split, choice)
    return None


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

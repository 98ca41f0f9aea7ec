"""Examples for supervised training: tuples of texts that begin with a prompt.

They come from a JSONL file or from a method of a prompt source, without end, in an order that
depends on the seed; none has a held-out prompt. Demonstrations are (prompt, completion) pairs,
preferences are triples of a prompt, a better and a worse completion.
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.errors import InputError
from actors.sources.files import read_table
from actors.sources.filters import PATIENCE
from actors.sources.registry import load_source
from actors.user_code import check_arguments, where_raised

Example = tuple[str, ...]
TURN = "\x1e"
"""In a prompt: the policy ended an earlier message here. It becomes the end-of-sequence token."""


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

    def problem(self, example: Any) -> str | None:
        """Return what is wrong with an example, which may be user code's; None if nothing is."""
        names = ", ".join(self.fields)
        texts = isinstance(example, tuple) and all(isinstance(text, str) for text in example)
        if not texts or len(example) != len(self.fields):
            return f"{example!r} must be a tuple of the strings {names}"
        prompt, *completions = example
        if not all(completions):
            return f"{example!r}: of {names}, only the prompt may be empty"
        if len({*completions}) < len(completions):
            return (
                f"{' and '.join(self.fields[1:])} are both {completions[0][:40]!r} for the prompt "
                f"{prompt[:40]!r}"
            )
        return None


DEMONSTRATIONS = ExampleKind(
    "sft.demonstrations", "demonstrations", ("prompt", "completion"), "worked examples"
)
PREFERENCES = ExampleKind(
    "reward_model.pairs", "preferences", ("prompt", "chosen", "rejected"), "preference pairs"
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
        name: Path of a `.jsonl` file, or a prompt source by name or dotted path.
        options: Keywords of the source's method; a file has none.
        seed: Decides the order.
        heldout: Texts of prompts; examples with one of them are left out.

    Raises:
        InputError: The file is missing or malformed, the source has no such examples or options, or
            every prompt is held out; a source may raise it with a later example.
    """
    subject = f"{kind.setting} = {name!r}"
    if name.endswith(".jsonl"):
        check_arguments(lambda: None, setting=subject, options=options)
        examples = [e for e in _read(kind, Path(name)) if e[0] not in heldout]
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
            f"{subject}: this source has no {kind.description}; give a .jsonl file with the fields "
            f"{', '.join(kind.fields)}, or a source with {kind.method}()"
        )
    check_arguments(method, setting=subject, options=options)
    try:
        drawn = method(**options)
    except InputError:
        raise
    except (TypeError, ValueError) as error:
        raise InputError(f"{subject} with {options}: {error}") from error
    return without(_checked(kind, drawn, subject), heldout, subject)


def without(
    examples: Iterator[Example], texts: frozenset[str], origin: str, *, advice: str = ""
) -> Iterator[Example]:
    """Yield examples whose prompt is none of some texts; `origin` and `advice` are messages.

    Raises InputError if `PATIENCE` prompts in a row were left out.
    """
    in_a_row = 0
    for example in examples:
        in_a_row = in_a_row + 1 if example[0] in texts else 0
        if not in_a_row:
            yield example
        elif in_a_row == PATIENCE:
            raise InputError(f"{origin}: {PATIENCE} prompts in a row were held out{advice}")


def _read(kind: ExampleKind, path: Path) -> list[Example]:
    examples = []
    for number, row in read_table(path, f"{kind.setting} = {str(path)!r}"):
        try:
            if isinstance(row, ValueError):
                raise row
            example = tuple(row[field] for field in kind.fields)
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{path}:{number}: expected an object with the strings {', '.join(kind.fields)}: "
                f"{error!r}"
            ) from None
        if (problem := kind.problem(example)) is not None:
            raise InputError(f"{path}:{number}: {problem}")
        examples.append(example)
    if not examples:
        raise InputError(f"{path}: no {kind.method}; each line is a JSON object")
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
        if (problem := kind.problem(example)) is not None:
            raise InputError(f"{subject}: {problem}")
        yield example

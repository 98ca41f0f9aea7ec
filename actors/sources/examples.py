"""Examples for supervised training: tuples of texts that begin with a prompt.

They come from a JSONL file or from a method of a prompt source, without end, in an order that
depends on the seed; none has a held-out prompt. Demonstrations are (prompt, completion) pairs;
`preferences` has the other kind. Tokenising and training them is up to `learner.supervised`.
"""

import inspect
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.errors import InputError
from actors.sources.filters import PATIENCE
from actors.sources.registry import load_source

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

    @property
    def options(self) -> str:
        """Return the key of the recipe with the keywords of `method`."""
        return f"{self.setting.partition('.')[0]}.options"


DEMONSTRATIONS = ExampleKind(
    "sft.demonstrations", "demonstrations", ("prompt", "completion"), "worked examples"
)


def load_demonstrations(
    name: str, *, options: dict[str, Any], seed: int, heldout: frozenset[str]
) -> Iterator[tuple[str, str]]:
    """Return endless (prompt, completion) pairs; arguments and errors as in `load_examples`."""
    examples = load_examples(DEMONSTRATIONS, name, options=options, seed=seed, heldout=heldout)
    return ((prompt, completion) for prompt, completion in examples)


def load_examples(
    kind: ExampleKind,
    name: str,
    *,
    options: dict[str, Any],
    seed: int,
    heldout: frozenset[str],
    problem: Callable[[Example], str | None] = lambda _: None,
) -> Iterator[Example]:
    """Return endless examples.

    Args:
        kind: Kind of the examples.
        name: Path of a `.jsonl` file, or a prompt source by name or dotted path.
        options: Keywords of the source's method; a file has none.
        seed: Decides the order of a file, and the problems of a source.
        heldout: Texts of the held-out prompts; examples with one of them are left out.
        problem: Describes what is wrong with an example of a file; None if nothing is.

    Raises:
        InputError: The file is missing or malformed, the source has no such examples or options, or
            every prompt is held out; a source may raise it with a later example.
    """
    if name.endswith(".jsonl"):
        _check_options(kind, name, options, known=())
        examples = [e for e in _read(kind, Path(name), problem) if e[0] not in heldout]
        if not examples:
            raise InputError(f"{name}: every prompt is held out; give other {kind.method}")
        return _shuffled(examples, seed)
    options = dict(options)
    source_options = options.pop("source_options", {})
    source = load_source(
        name, options=source_options, seed=seed, split="train", heldout_size=len(heldout)
    )
    method = getattr(source, kind.method, None)
    if not callable(method):
        raise InputError(
            f"{kind.setting} = {name!r}: this source has no {kind.description}; give a .jsonl file "
            f"with the fields {_listed(kind.fields)}, or a source with {kind.method}()"
        )
    parameters = inspect.signature(method).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        known = tuple(parameter.name for parameter in parameters)
        _check_options(kind, name, options, known=known)
    try:
        examples = method(**options)
    except InputError:
        raise
    except (TypeError, ValueError) as error:
        raise InputError(f"{kind.setting} = {name!r} with {options}: {error}") from error
    return without(examples, heldout, f"{kind.setting} = {name!r}")


def without(
    examples: Iterator[Example], texts: frozenset[str], origin: str, *, advice: str = ""
) -> Iterator[Example]:
    """Yield the examples whose prompt is none of some texts.

    Args:
        examples: Endless.
        texts: Prompts to leave out.
        origin: Where the examples come from, for the message.
        advice: Appended to the message.

    Raises:
        InputError: `PATIENCE` prompts in a row were left out.
    """
    in_a_row = 0
    for example in examples:
        in_a_row = in_a_row + 1 if example[0] in texts else 0
        if not in_a_row:
            yield example
        elif in_a_row == PATIENCE:
            raise InputError(f"{origin}: {PATIENCE} prompts in a row were held out{advice}")


def _check_options(
    kind: ExampleKind, name: str, options: dict[str, Any], *, known: tuple[str, ...]
) -> None:
    unknown = sorted(options.keys() - set(known))
    if unknown:
        raise InputError(
            f"{kind.options}: {kind.setting} = {name!r} has no option {', '.join(unknown)}; "
            f"known: {', '.join(known) or 'none'}"
        )


def _read(kind: ExampleKind, path: Path, problem: Callable[[Example], str | None]) -> list[Example]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{kind.setting} = {str(path)!r} cannot be read: {error}") from None
    examples = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            examples.append(_example(kind, f"{path}:{number}", line))
            if (wrong := problem(examples[-1])) is not None:
                raise InputError(f"{path}:{number}: {wrong}")
    if not examples:
        raise InputError(f"{path}: no {kind.method}; each line is a JSON object")
    return examples


def _example(kind: ExampleKind, position: str, line: str) -> Example:
    listed = _listed(kind.fields)
    try:
        row = json.loads(line)
        example = tuple(row[field] for field in kind.fields)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{position}: expected an object with the strings {listed}: {error!r}"
        ) from None
    if not (all(isinstance(text, str) for text in example) and all(example[1:])):
        raise InputError(
            f"{position}: {listed} must be strings, {_listed(kind.fields[1:])} not empty"
        )
    return example


def _listed(names: tuple[str, ...]) -> str:
    """Join names as in a sentence: "a, b and c"."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def _shuffled(examples: list[Example], seed: int) -> Iterator[Example]:
    """Yield the examples without end, every epoch in an order of its own."""
    epoch = 0
    while True:
        yield from random.Random(f"{seed}/{epoch}").sample(examples, len(examples))
        epoch += 1

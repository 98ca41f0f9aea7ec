"""Examples to learn from: tuples of texts that begin with a prompt, from a JSONL file or a source.

Whatever they are of, they come endlessly, in an order of their own for every seed, and none has a
held-out prompt. Leaves out what kinds there are (`demonstrations`, `preferences`).
"""

import inspect
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.errors import InputError
from actors.sources.heldout_filter import PATIENCE
from actors.sources.registry import load_source

Example = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of examples."""

    setting: str
    """Key of the recipe that names their origin, such as `sft.demonstrations`."""
    method: str
    """Of a source that has them."""
    fields: tuple[str, ...]
    """Of a line of a file: the prompt first. Only the prompt may be empty."""
    called: str
    """What a source without them has none of."""

    @property
    def options(self) -> str:
        """Key of the recipe with the keywords of `method`."""
        return f"{self.setting.partition('.')[0]}.options"


def load_examples(
    kind: Kind,
    name: str,
    *,
    options: dict[str, Any],
    seed: int,
    heldout: frozenset[str],
    problem: Callable[[Example], str | None] = lambda _: None,
) -> Iterator[Example]:
    """Endless examples.

    Args:
        kind: What is looked for.
        name: Path of a `.jsonl` file, or a prompt source by name or dotted path.
        options: Keywords of the source's method; a file has none.
        seed: Of the order, or of the source.
        heldout: Texts of the held-out prompts; examples with one of them are left out.
        problem: What is wrong with a line of a file whose fields are sound; None if nothing is.

    Raises:
        InputError: The file is missing or malformed, the source has no such examples or options, or
            every prompt is held out; of a source this may come with a later example.
    """
    if name.endswith(".jsonl"):
        _check_options(kind, name, options, known=())
        examples = [e for e in _read(kind, Path(name), problem) if e[0] not in heldout]
        if not examples:
            raise InputError(f"{name}: every prompt is held out; give other {kind.method}")
        return _shuffled(examples, seed)
    options = dict(options)
    of_source = options.pop("source_options", {})
    source = load_source(
        name, options=of_source, seed=seed, split="train", heldout_size=len(heldout)
    )
    method = getattr(source, kind.method, None)
    if not callable(method):
        raise InputError(
            f"{kind.setting} = {name!r}: this source has no {kind.called}; give a .jsonl file with "
            f"the fields {_listed(kind.fields)}, or a source with {kind.method}()"
        )
    parameters = inspect.signature(method).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        known = tuple(parameter.name for parameter in parameters)
        _check_options(kind, name, options, known=known)
    try:
        found = method(**options)
    except InputError:
        raise
    except (TypeError, ValueError) as error:
        raise InputError(f"{kind.setting} = {name!r} with {options}: {error}") from error
    return without(found, heldout, f"{kind.setting} = {name!r}")


def without(
    examples: Iterator[Example], texts: frozenset[str], place: str, *, advice: str = ""
) -> Iterator[Example]:
    """The examples whose prompt is none of some texts.

    Args:
        examples: Endless.
        texts: What no prompt may say.
        place: Where they come from, for the message.
        advice: What to do about it, the end of the message.

    Raises:
        InputError: Next to every prompt is one of them; comes with a later example.
    """
    in_a_row = 0
    for example in examples:
        in_a_row = in_a_row + 1 if example[0] in texts else 0
        if not in_a_row:
            yield example
        elif in_a_row == PATIENCE:
            raise InputError(f"{place}: {PATIENCE} prompts in a row were held out{advice}")


def _check_options(
    kind: Kind, name: str, options: dict[str, Any], *, known: tuple[str, ...]
) -> None:
    unknown = sorted(options.keys() - set(known))
    if unknown:
        raise InputError(
            f"{kind.options}: {kind.setting} = {name!r} has no option {', '.join(unknown)}; "
            f"known: {', '.join(known) or 'none'}"
        )


def _read(kind: Kind, path: Path, problem: Callable[[Example], str | None]) -> list[Example]:
    """All examples of a file."""
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


def _example(kind: Kind, place: str, line: str) -> Example:
    listed = _listed(kind.fields)
    try:
        row = json.loads(line)
        example = tuple(row[field] for field in kind.fields)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{place}: expected an object with the strings {listed}: {error!r}"
        ) from None
    if not (all(isinstance(text, str) for text in example) and all(example[1:])):
        raise InputError(f"{place}: {listed} must be strings, {_listed(kind.fields[1:])} not empty")
    return example


def _listed(names: tuple[str, ...]) -> str:
    """Names as a sentence has them."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def _shuffled(examples: list[Example], seed: int) -> Iterator[Example]:
    """Every epoch in an order of its own."""
    epoch = 0
    while True:
        yield from random.Random(f"{seed}/{epoch}").sample(examples, len(examples))
        epoch += 1

"""Examples for supervised training: tuples of texts that begin with a prompt.

They come from a JSONL file or from a method of a prompt source, without end, in an order that
depends on the seed; none has a held-out prompt. Demonstrations are (prompt, completion) pairs,
preferences are triples of a prompt, a better and a worse completion.
"""

import inspect
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

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
PREFERENCES = ExampleKind(
    "reward_model.pairs", "preferences", ("prompt", "chosen", "rejected"), "preference pairs"
)


class Preference(NamedTuple):
    """Two completions of a prompt."""

    prompt: str
    chosen: str
    rejected: str


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
        seed: Decides the order.
        heldout: Texts of prompts; examples with one of them are left out.
        problem: Describes what is wrong with an example of a file, if anything.

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
    """Yield the examples whose prompt is none of some texts; `origin` and `advice` are messages.

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


def load_preferences(
    name: str, *, options: dict[str, Any], seed: int, heldout: frozenset[str]
) -> Iterator[Preference]:
    """Return endless preference pairs; arguments as in `load_examples`.

    Raises:
        InputError: As in `load_examples`, or completions that are equal, or a source that raised or
            gave something else than pairs. A source may raise it with a later pair.
    """
    examples = load_examples(
        PREFERENCES, name, options=options, seed=seed, heldout=heldout, problem=_equal_completions
    )
    return _checked_preferences(examples, f"{PREFERENCES.setting} = {name!r}")


def _checked_preferences(examples: Iterator[Any], origin: str) -> Iterator[Preference]:
    """Yield the pairs after checking each: the source may be user code."""
    while True:
        try:
            example = next(examples)
        except StopIteration:
            raise InputError(f"{origin} came to an end; preferences() must be endless") from None
        except InputError:
            raise
        except Exception as error:
            raise InputError(f"{origin} raised {error!r}") from error
        texts = isinstance(example, tuple) and all(isinstance(text, str) for text in example)
        if not texts or len(example) != len(PREFERENCES.fields):
            raise InputError(
                f"{origin} gave {example!r}, must give tuples of the texts prompt, chosen, rejected"
            )
        if (wrong := _equal_completions(example)) is not None:
            raise InputError(f"{origin}, prompt {example[0][:40]!r}: {wrong}")
        yield Preference(*example)


def _equal_completions(example: Example) -> str | None:
    _, chosen, rejected = example
    return f"chosen and rejected are both {chosen[:40]!r}" if chosen == rejected else None

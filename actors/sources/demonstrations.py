"""Demonstrations for a supervised warm start: (prompt, completion) pairs from a file or a source.

A JSONL file has the fields `prompt` and `completion`; a prompt source has them if it offers
`demonstrations(**options)`. No pair has a held-out prompt. Leaves out how they are tokenised and
trained (`learner.sft`).
"""

import inspect
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from actors.errors import InputError
from actors.sources.source import load_source
from actors.sources.without_heldout import PATIENCE


def load_demonstrations(
    name: str, *, options: dict[str, Any], seed: int, heldout: frozenset[str]
) -> Iterator[tuple[str, str]]:
    """Endless (prompt, completion) pairs.

    Args:
        name: Path of a `.jsonl` file, or a prompt source by name or dotted path.
        options: Keywords of the source's `demonstrations`; a file has none.
        seed: Of the order, or of the source.
        heldout: Texts of the held-out prompts; pairs with one of them are left out.

    Raises:
        InputError: The file is missing or malformed, the source has no worked examples or not such
            options, or every prompt is held out; of a source this may come with a later pair.
    """
    if name.endswith(".jsonl"):
        _check_options(name, options, known=())
        pairs = [pair for pair in _read(Path(name)) if pair[0] not in heldout]
        if not pairs:
            raise InputError(f"{name}: every prompt is held out; give other demonstrations")
        return _shuffled(pairs, seed)
    source = load_source(name, options={}, seed=seed, split="train", heldout_size=len(heldout))
    demonstrations = getattr(source, "demonstrations", None)
    if not callable(demonstrations):
        raise InputError(
            f"sft.demonstrations = {name!r}: this source has no worked examples; give a .jsonl "
            "file with the fields prompt and completion, or a source with demonstrations()"
        )
    parameters = inspect.signature(demonstrations).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        _check_options(name, options, known=tuple(parameter.name for parameter in parameters))
    try:
        found = demonstrations(**options)
    except InputError:
        raise
    except (TypeError, ValueError) as error:
        raise InputError(f"sft.demonstrations = {name!r} with {options}: {error}") from error
    return _without(found, heldout, name)


def _check_options(name: str, options: dict[str, Any], *, known: tuple[str, ...]) -> None:
    unknown = sorted(options.keys() - set(known))
    if unknown:
        raise InputError(
            f"sft.options: sft.demonstrations = {name!r} has no option {', '.join(unknown)}; "
            f"known: {', '.join(known) or 'none'}"
        )


def _without(
    pairs: Iterator[tuple[str, str]], heldout: frozenset[str], name: str
) -> Iterator[tuple[str, str]]:
    """The pairs whose prompt is not held out."""
    in_a_row = 0
    for pair in pairs:
        in_a_row = in_a_row + 1 if pair[0] in heldout else 0
        if not in_a_row:
            yield pair
        elif in_a_row == PATIENCE:
            raise InputError(
                f"sft.demonstrations = {name!r}: {PATIENCE} prompts in a row were held out"
            )


def _read(path: Path) -> list[tuple[str, str]]:
    """All pairs of a file."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"sft.demonstrations = {str(path)!r} cannot be read: {error}") from None
    pairs = [_pair(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not pairs:
        raise InputError(f"{path}: no demonstrations; each line is a JSON object")
    return pairs


def _pair(path: Path, number: int, line: str) -> tuple[str, str]:
    try:
        row = json.loads(line)
        prompt, completion = row["prompt"], row["completion"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path}:{number}: expected an object with the strings prompt and completion: {error!r}"
        ) from None
    if not (isinstance(prompt, str) and isinstance(completion, str) and completion):
        raise InputError(
            f"{path}:{number}: prompt and completion must be strings, completion not empty"
        )
    return prompt, completion


def _shuffled(pairs: list[tuple[str, str]], seed: int) -> Iterator[tuple[str, str]]:
    """Every epoch in an order of its own."""
    epoch = 0
    while True:
        yield from random.Random(f"{seed}/{epoch}").sample(pairs, len(pairs))
        epoch += 1

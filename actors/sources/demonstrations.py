"""Demonstrations for a supervised warm start: (prompt, completion) pairs from a file or a source.

A JSONL file has the fields `prompt` and `completion`; a prompt source has them if it offers
`demonstrations(**options)`. Leaves out how they are tokenised and trained (`learner.sft`).
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from actors.errors import InputError
from actors.sources.source import load_source


def load_demonstrations(
    name: str, *, options: dict[str, Any], seed: int, heldout_size: int
) -> Iterator[tuple[str, str]]:
    """Endless (prompt, completion) pairs.

    Args:
        name: Path of a `.jsonl` file, or a prompt source by name or dotted path.
        options: Keywords of the source's `demonstrations`.
        seed: Of the order, or of the source.
        heldout_size: Held-out problems that the source must not draw.

    Raises:
        InputError: The file is missing or malformed, or the source has no worked examples.
    """
    if name.endswith(".jsonl"):
        return _shuffled(_read(Path(name)), seed)
    source = load_source(name, options={}, seed=seed, split="train", heldout_size=heldout_size)
    if not hasattr(source, "demonstrations"):
        raise InputError(
            f"sft.demonstrations = {name!r}: this source has no worked examples; give a .jsonl "
            "file with the fields prompt and completion, or a source with demonstrations()"
        )
    pairs: Iterator[tuple[str, str]] = source.demonstrations(**options)
    return pairs


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

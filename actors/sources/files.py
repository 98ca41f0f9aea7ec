"""Prompts from a JSONL file: one object a line with `prompt`, and perhaps `answer` and `metadata`.

Every epoch is shuffled by a seed of its own. What is held out is decided by the text alone: the
problems with the smallest hashes, the same for every seed and every order of the lines, or those of
a second file. Training leaves out every line with a held-out text. Leaves out other formats.
"""

import json
import random
from pathlib import Path
from typing import Any

import xxhash

from actors.errors import InputError
from actors.sources.source import Split
from queues.records import Prompt

FIELDS = ("prompt", "answer", "metadata")


class FileSource:
    """Lines of a file (a `PromptSource`).

    Args:
        options: `path` of the file, and `heldout_path` of a second one to hold out from.
        seed: Of the shuffling.
        split: Which lines to draw.
        heldout_size: Distinct held-out prompts.

    Raises:
        InputError: A file that cannot be read, a line that is malformed, or too few lines.
    """

    def __init__(
        self,
        *,
        options: dict[str, Any],
        seed: int,
        split: Split = "train",
        heldout_size: int = 0,
    ) -> None:
        path, heldout_path = _paths(options)
        lines = _read(path)
        heldout = _hold_out(_read(heldout_path) if heldout_path else lines, heldout_size)
        self._split = split
        if split == "heldout":
            self._lines, self._label = heldout, f"{(heldout_path or path).stem}_heldout"
        else:
            texts = {line.text for line in heldout}
            self._lines, self._label = [x for x in lines if x.text not in texts], path.stem
        if not self._lines:
            raise InputError(
                f"{path}: nothing is left for the {split} split: {len(lines)} lines, "
                f"{heldout_size} held out"
            )
        self._seed = seed
        self._place = 0
        self._order: tuple[int, list[int]] | None = None

    def next(self, count: int) -> list[Prompt]:
        """See `PromptSource.next`."""
        start, self._place = self._place, self._place + count
        return [self._at(place) for place in range(start, start + count)]

    def cursor(self) -> str:
        """See `PromptSource.cursor`."""
        return json.dumps({"place": self._place})

    def restore(self, cursor: str) -> None:
        """See `PromptSource.restore`."""
        self._place = json.loads(cursor)["place"]

    def _at(self, place: int) -> Prompt:
        epoch, position = divmod(place, len(self._lines))
        line = self._lines[self._shuffled(epoch)[position]]
        return Prompt(
            prompt_id=f"{self._label}/{epoch}/{line.prompt_id}",
            text=line.text,
            answer=line.answer,
            metadata=line.metadata,
        )

    def _shuffled(self, epoch: int) -> list[int]:
        """The order of an epoch; held-out lines stay in theirs."""
        if self._order is None or self._order[0] != epoch:
            order = list(range(len(self._lines)))
            if self._split == "train":
                random.Random(f"{self._seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._order[1]


def _paths(options: dict[str, Any]) -> tuple[Path, Path | None]:
    unknown = sorted(options.keys() - {"path", "heldout_path"})
    if unknown or not isinstance(options.get("path"), str):
        raise InputError(
            f"source 'files' with options {options}: give path, and if you like heldout_path; "
            f"unknown: {', '.join(unknown) or 'none'}"
        )
    heldout = options.get("heldout_path")
    return Path(options["path"]).expanduser(), heldout and Path(heldout).expanduser()


def _hold_out(lines: list[Prompt], size: int) -> list[Prompt]:
    """The first line of each of the `size` texts with the smallest hashes."""
    distinct = {line.text: line for line in reversed(lines)}
    if size > len(distinct):
        raise InputError(
            f"{size} prompts cannot be held out of {len(distinct)} different ones; "
            "lower heldout.size and heldout.final_size"
        )
    return sorted(distinct.values(), key=_hash)[:size]


def _hash(line: Prompt) -> int:
    return xxhash.xxh3_64_intdigest(line.text.encode())


def _read(path: Path) -> list[Prompt]:
    """All lines of a file; the id of each is its number, from 1."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"prompt file {str(path)!r} cannot be read: {error}") from error
    prompts = [_line(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise InputError(f"{path}: no prompts; give one JSON object a line")
    return prompts


def _line(path: Path, number: int, line: str) -> Prompt:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise InputError(f"{path}:{number}: not JSON: {error}") from None
    problem = _problem(row)
    if problem:
        raise InputError(f"{path}:{number}: {problem}")
    answer = row.get("answer")
    return Prompt(
        prompt_id=str(number),
        text=row["prompt"],
        answer=None if answer is None else str(answer),
        metadata=row.get("metadata") or {},
    )


def _problem(row: Any) -> str | None:
    """What is wrong with a line; None if nothing is."""
    if not isinstance(row, dict):
        return f"found {type(row).__name__}, must be an object with the field prompt"
    unknown = sorted(row.keys() - set(FIELDS))
    if unknown:
        return f"unknown fields {', '.join(unknown)}; must be {', '.join(FIELDS)}"
    if not isinstance(row.get("prompt"), str) or not row["prompt"]:
        return f"prompt is {row.get('prompt')!r}, must be a string that is not empty"
    if not isinstance(row.get("answer"), (str, int, float, type(None))):
        return f"answer is {row['answer']!r}, must be a string or a number"
    if not isinstance(row.get("metadata"), (dict, type(None))):
        return f"metadata is {row['metadata']!r}, must be an object"
    return None

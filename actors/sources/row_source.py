"""The order of prompts that come from rows: shuffled by epoch, resumable, some of them held out.

Held-out prompts are those with the smallest hashes of their text, the same for every seed and every
order of the rows, or those of a second table. Training leaves out every row with a held-out text.
"""

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

import xxhash

from actors.sources.fingerprints import Fingerprints, of_prompts
from actors.sources.protocol import Split
from actors.sources.resumable import ResumableSource
from actors.sources.rows import LOG, Row, RowOptions, read_rows
from headway.errors import InputError
from queues.records import Prompt


class Table(NamedTuple):
    """A table of prompts, not yet read."""

    label: str
    """Begins the prompt ids."""
    name: str
    """Name in messages."""
    rows: Callable[[], Iterable[tuple[int, Row]]]
    """Returns the rows with their numbers."""


class RowSource(ResumableSource):
    """Rows of a table, with those of `heldout` held out, or some of its own without it.

    A `RestartableSource`: the ids of changed rows have the number of changes so far after their
    label, as in `prompts~1/0/7`. Raises InputError for a table that cannot be read, or too few
    rows.
    """

    def __init__(
        self,
        table: Table,
        heldout: Table | None,
        options: RowOptions,
        *,
        seed: int,
        split: Split = "train",
        heldout_size: int = 0,
    ) -> None:
        super().__init__()
        rows, notes = read_rows(table.name, table.rows(), options)
        others = read_rows(heldout.name, heldout.rows(), options)[0] if heldout else rows
        held_out = _hold_out(others, heldout_size)
        self._split = split
        read = [(table, rows), *([(heldout, others)] if heldout else [])]
        self._fingerprints = {part.name: of_prompts(prompts) for part, prompts in read}
        if split == "heldout":
            self._rows = held_out
            self._label = f"{(heldout or table).label}_heldout"
        else:
            for note in notes:
                LOG.warning("%s", note)
            texts = {row.text for row in held_out}
            index, count = options.shard
            self._rows = [row for row in rows if row.text not in texts][index::count]
            self._label = table.label
        if not self._rows:
            raise InputError(
                f"{table.name}: nothing is left for the {split} split: {len(rows)} prompts, "
                f"{heldout_size} held out, shard {list(options.shard)}"
            )
        self._seed = seed
        self._table = table.name
        self._changes = 0
        self._order: tuple[str, list[int]] = ("", [])
        """Name of the last epoch, and the order of its rows."""

    def fingerprints(self) -> Fingerprints:
        return self._fingerprints

    def cursor(self) -> str:
        return json.dumps({**json.loads(super().cursor()), "changes": self._changes})

    def restore(self, cursor: str) -> None:
        super().restore(cursor)
        self._changes = json.loads(cursor)["changes"]

    def restart(self, cursor: str) -> None:
        self.position = 0
        self._changes = json.loads(cursor)["changes"] + 1

    def draw(self) -> Prompt:
        epoch, index = divmod(self.position, len(self._rows))
        self.position += 1
        row = self._rows[self._shuffled(epoch)[index]]
        return replace(row, prompt_id=f"{self._label}{self._edition}/{epoch}/{row.prompt_id}")

    def table(self) -> list[Prompt]:
        """See `TableSource.table`."""
        return [replace(row, prompt_id=f"{self._table}:{row.prompt_id}") for row in self._rows]

    @property
    def _edition(self) -> str:
        return f"~{self._changes}" if self._changes else ""

    def _shuffled(self, epoch: int) -> list[int]:
        """Return the order of an epoch; held-out rows keep their order."""
        name = f"{self._seed}{self._edition}/{epoch}"
        if self._order[0] != name:
            order = list(range(len(self._rows)))
            if self._split == "train":
                random.Random(name).shuffle(order)
            self._order = (name, order)
        return self._order[1]


def _hold_out(rows: list[Prompt], size: int) -> list[Prompt]:
    """Return the first row of each of the `size` texts with the smallest hashes."""
    distinct = {row.text: row for row in reversed(rows)}
    if size > len(distinct):
        raise InputError(
            f"{size} prompts cannot be held out of {len(distinct)} different ones; "
            "lower heldout.size and heldout.final_size"
        )
    return sorted(
        distinct.values(),
        key=lambda row: xxhash.xxh3_64_intdigest(row.text.encode(errors="surrogatepass")),
    )[:size]

"""Prompts from a data set of Hugging Face's library `datasets`: by name, or from a folder.

The library is not installed with Headway: `pip install headway-rl[datasets]`.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from actors.sources.row_source import RowSource, Table
from actors.sources.rows import Row, RowOptions
from headway.errors import InputError
from headway.options import parse_options
from headway.recipe_section import Section
from headway.user_code import PARAGRAPH, shown


class DatasetChoice(Section):
    """A part of a data set."""

    split: str = "train"
    """Split to train on."""
    config: str | None = None
    """Configuration of the data set."""
    revision: str | None = None
    """Commit, branch or tag on the hub."""


class DatasetOptions(RowOptions, DatasetChoice):
    """Options of `datasets:NAME`."""

    heldout_split: str | None = None
    """Split of the held-out prompts; None holds out some of the first one."""


def dataset_source(name: str, *, options: dict[str, Any], **order: Any) -> RowSource:
    """Open a data set as a source; `options` are `DatasetOptions`, `order` is as in `load_source`.

    `name` is one of the hub, as "openai/gsm8k", or a folder, written by `save_to_disk` or of files.
    Raises InputError without the library or the data set, or for rows that are malformed.
    """
    chosen = parse_options(DatasetOptions, f"source 'datasets:{name}'", options)
    label = Path(name).name

    def table(label: str, part: str) -> Table:
        rows = partial(dataset_rows, name, part, chosen)
        return Table(label, f"datasets:{name}[{part}]", rows)

    part = chosen.heldout_split
    heldout = table(f"{label}_{part}", part) if part else None
    return RowSource(table(label, chosen.split), heldout, chosen, **order)


def dataset_rows(name: str, part: str, options: DatasetChoice) -> Iterator[tuple[int, Row]]:
    """Yield numbered rows, or why one cannot be read; raise InputError without such a split."""
    from actors.sources.arrow_rows import ROWS, rows_of

    rows = _split(name, part, options).with_format("arrow")
    tables = (rows[start : start + ROWS] for start in range(0, len(rows), ROWS))
    subject = f"datasets:{name}[{part}]"
    yield from enumerate((row for table in tables for row in rows_of(table, subject)), 1)


def _split(name: str, part: str, options: DatasetChoice) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise InputError(
            f"it needs the library datasets, which cannot be imported ({error}); install it with: "
            "pip install 'headway-rl[datasets]'"
        ) from None
    path = Path(name).expanduser()
    saved = any((path / mark).exists() for mark in ("dataset_dict.json", "state.json"))
    try:
        if saved:
            loaded = datasets.load_from_disk(str(path))
            rows: Any = loaded[part] if isinstance(loaded, datasets.DatasetDict) else loaded
        else:
            rows = datasets.load_dataset(
                str(path) if path.exists() else name,
                options.config,
                split=part,
                revision=options.revision,
            )
    except Exception as error:
        raise InputError(f"datasets:{name}, split {part!r}: {shown(error, PARAGRAPH)}") from error
    return rows

"""Prompts from a file: JSONL, Parquet or Arrow, a row with `prompt`, and perhaps `answer` and more.

`rows.RowOptions` lists the options besides the paths. Leaves out folders of Hugging Face's
`datasets` (`hub_dataset`).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from actors.errors import InputError
from actors.sources.protocol import Split
from actors.sources.row_source import RowSource
from actors.sources.rows import Read, RowOptions, read_rows, row_options
from actors.sources.tables import read_table

PATHS = ("path", "heldout_path")


class FileSource(RowSource):
    """Rows of a file (a `PromptSource`).

    Args:
        options: `path` of the file, `heldout_path` of a second one to hold out from, and those of
            `RowOptions`.
        seed: Of the shuffling.
        split: Which rows to draw.
        heldout_size: Distinct held-out prompts.

    Raises:
        InputError: A file that cannot be read, rows that are malformed, or too few of them.
    """

    def __init__(
        self,
        *,
        options: dict[str, Any],
        seed: int,
        split: Split = "train",
        heldout_size: int = 0,
    ) -> None:
        path, heldout_path = (_path(options, name) for name in PATHS)
        if path is None:
            raise InputError(
                f"source 'files' with options {options}: give path, and if you like heldout_path "
                f"and {', '.join(RowOptions.model_fields)}"
            )
        others = {key: value for key, value in options.items() if key not in PATHS}
        chosen = row_options("files", others)
        super().__init__(
            _table(path, chosen),
            _table(heldout_path, chosen) if heldout_path else None,
            seed=seed,
            split=split,
            heldout_size=heldout_size,
            shard=chosen.shard,
        )


def _table(path: Path, options: RowOptions) -> tuple[str, Callable[[], Read]]:
    return path.stem, lambda: read_rows(str(path), read_table(path), options)


def _path(options: dict[str, Any], name: str) -> Path | None:
    found = options.get(name)
    if found is None:
        return None
    if not isinstance(found, str):
        raise InputError(f"source 'files': {name} = {found!r}, must be a path")
    return Path(found).expanduser()

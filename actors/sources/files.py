"""Prompts from a JSONL, Parquet or Arrow file whose rows have a `prompt` and perhaps an `answer`.

`rows.RowOptions` lists the options besides the paths. `hub_dataset` reads folders of Hugging Face's
library `datasets`.
"""

from pathlib import Path
from typing import Any

from actors.errors import InputError
from actors.sources.row_source import RowSource, Table
from actors.sources.rows import RowOptions, read_rows, row_options
from actors.sources.tables import read_table

PATHS = ("path", "heldout_path")


def file_source(*, options: dict[str, Any], **order: Any) -> RowSource:
    """Open a file as a source.

    Args:
        options: `path` of the file, `heldout_path` of a second one to hold out from, and those of
            `RowOptions`.
        **order: Keywords `seed`, `split` and `heldout_size` of `RowSource`.

    Raises:
        InputError: A file that cannot be read, rows that are malformed, or too few of them.
    """
    path, heldout_path = (_path(options, name) for name in PATHS)
    if path is None:
        raise InputError(
            f"source 'files' with options {options}: give path, and if you like heldout_path "
            f"and {', '.join(RowOptions.model_fields)}"
        )
    others = {key: value for key, value in options.items() if key not in PATHS}
    chosen = row_options("files", others)
    heldout = _table(heldout_path, chosen) if heldout_path else None
    return RowSource(_table(path, chosen), heldout, shard=chosen.shard, **order)


def _table(path: Path, options: RowOptions) -> Table:
    return path.stem, lambda: read_rows(str(path), read_table(path), options)


def _path(options: dict[str, Any], name: str) -> Path | None:
    path = options.get(name)
    if path is None:
        return None
    if not isinstance(path, str):
        raise InputError(f"source 'files': {name} = {path!r}, must be a path")
    return Path(path).expanduser()

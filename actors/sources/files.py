"""Prompts from a JSONL, Parquet or Arrow file; the suffix decides the format.

Rows are numbered from 1, those of JSONL by their lines.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from actors.errors import InputError
from actors.sources.row_source import RowSource, Table
from actors.sources.rows import Row, RowOptions, read_rows, row_options

PATHS = ("path", "heldout_path")
SUFFIXES = (".jsonl", ".parquet", ".arrow", ".feather", ".ipc")


def file_source(*, options: dict[str, Any], **order: Any) -> RowSource:
    """Open a file as a source; `order` has the keywords `seed`, `split` and `heldout_size`.

    Options are `path` of the file, `heldout_path` of a second one, and those of `RowOptions`.

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


def read_table(path: Path) -> Iterable[tuple[int, Row]]:
    """Yield the rows of a file with their numbers; for a row that cannot be parsed, the reason.

    Raises:
        InputError: The file as a whole cannot be read.
    """
    if path.suffix in (".jsonl", ".json", ".ndjson", ""):
        return _json_lines(path)
    if path.suffix not in SUFFIXES:
        raise InputError(f"prompt file {str(path)!r}: must end in {', '.join(SUFFIXES)}")
    return enumerate(_arrow(path), 1)


def _json_lines(path: Path) -> Iterator[tuple[int, Row]]:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise InputError(f"prompt file {str(path)!r} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield number, _json(line)


def _json(line: bytes) -> Row:
    try:
        row: Row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return ValueError(f"not UTF-8: {error}")
    except (ValueError, RecursionError) as error:
        return ValueError(f"not JSON: {error}")
    return row


def _arrow(path: Path) -> list[dict[str, Any]]:
    import pyarrow
    from pyarrow import feather, ipc, parquet

    try:
        if path.suffix == ".parquet":
            table = parquet.read_table(path)
        elif path.suffix == ".feather":
            table = feather.read_table(path)
        else:
            with pyarrow.memory_map(str(path)) as file:
                try:
                    table = ipc.open_file(file).read_all()
                except pyarrow.ArrowInvalid:
                    file.seek(0)
                    table = ipc.open_stream(file).read_all()
        rows: list[dict[str, Any]] = table.to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise InputError(f"prompt file {str(path)!r} cannot be read: {error}") from error
    return rows

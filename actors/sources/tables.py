"""Reads the rows of JSONL, Parquet and Arrow IPC files; the suffix decides the format.

Rows are numbered from 1, those of JSONL by their lines. `rows` turns them into prompts.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from actors.errors import InputError
from actors.sources.rows import Row

SUFFIXES = (".jsonl", ".parquet", ".arrow", ".feather", ".ipc")


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

"""Prompts from a JSONL, Parquet or Arrow file, by its suffix; JSONL is numbered by lines."""

import codecs
import json
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from actors.sources.row_source import RowSource, Table
from actors.sources.rows import Row, RowOptions
from headway.errors import InputError
from headway.options import parse_options

SUFFIXES = (".jsonl", ".parquet", ".arrow", ".feather", ".ipc")


class FileOptions(RowOptions):
    """Options of `files`."""

    path: str
    """File of the training prompts."""
    heldout_path: str | None = None
    """File of the held-out prompts; None holds out some of the first file."""


def file_source(*, options: dict[str, Any], **order: Any) -> RowSource:
    """Open a file as a source; raise InputError if it cannot be read or has too few good rows.

    `options` are `FileOptions`, `order` is as in `load_source`.
    """
    chosen = parse_options(FileOptions, "source 'files'", options)
    heldout = _table(chosen.heldout_path) if chosen.heldout_path else None
    return RowSource(_table(chosen.path), heldout, chosen, **order)


def _table(name: str) -> Table:
    path = Path(name).expanduser()
    return Table(path.stem, str(path), partial(read_table, path, f"prompt file {name!r}"))


def read_table(path: Path, subject: str) -> Iterable[tuple[int, Row]]:
    """Yield numbered rows, or why one is broken; raise InputError for an unreadable file."""
    if path.suffix in (".jsonl", ".json", ".ndjson", ""):
        return _json_lines(path, subject)
    if path.suffix not in SUFFIXES:
        raise InputError(f"{subject}: must end in {', '.join(SUFFIXES)}")
    return enumerate(_arrow(path, subject), 1)


def _json_lines(path: Path, subject: str) -> Iterator[tuple[int, Row]]:
    try:
        lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    except OSError as error:
        raise InputError(f"{subject} cannot be read: {error}") from error
    if lines[0].startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise InputError(f"{subject} begins with the byte order mark of UTF-16; must be UTF-8")
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield number, _json(line)


def _json(line: bytes) -> Row:
    try:
        row: Row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return ValueError(f"not UTF-8: {error}")
    except json.JSONDecodeError as error:
        return ValueError(f"not JSON: {error.msg} at character {error.pos + 1}")
    except (ValueError, RecursionError) as error:
        return ValueError(f"not JSON: {error}")
    return row


def _arrow(path: Path, subject: str) -> Iterator[Row]:
    import pyarrow
    from pyarrow import ipc, parquet

    try:
        if path.suffix == ".parquet":
            table = parquet.read_table(path)
        else:
            with pyarrow.memory_map(str(path)) as file:
                try:
                    table = ipc.open_file(file).read_all()
                except pyarrow.ArrowInvalid:
                    file.seek(0)
                    table = ipc.open_stream(file).read_all()
    except (OSError, UnicodeError, pyarrow.ArrowException) as error:
        raise InputError(f"{subject} cannot be read: {error}") from error
    for batch in table.to_batches(max_chunksize=1024):
        try:
            yield from batch.to_pylist()
        except UnicodeDecodeError:
            yield from (_arrow_row(batch.slice(index, 1)) for index in range(batch.num_rows))


def _arrow_row(batch: Any) -> Row:
    try:
        row: Row = batch.to_pylist()[0]
    except UnicodeDecodeError as error:
        return ValueError(f"not UTF-8: {error}")
    return row

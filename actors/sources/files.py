"""Prompts from a file: JSON, CSV, Parquet or Arrow, by its suffix, perhaps compressed.

Rows are numbered from 1; those of JSONL by lines.
"""

import codecs
import csv
import json
from collections.abc import Iterable, Iterator
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

from actors.sources.row_source import RowSource, Table
from actors.sources.rows import Row, RowOptions
from headway.errors import InputError
from headway.options import parse_options
from headway.user_code import beside_recipe

ARROW = (".parquet", ".arrow", ".feather", ".ipc")
CSV = {".csv": ",", ".tsv": "\t"}
SUFFIXES = (".jsonl", *ARROW, ".json", ".ndjson", *CSV)
COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
"""Suffixes that may follow those of texts, with Arrow's names of the compressions."""
LONGEST_FIELD = 2**31 - 1
"""Most characters of a field of CSV, of which the library allows 131,072."""


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
    path = beside_recipe(name)
    return Table(path.stem, str(path), partial(read_table, path, f"prompt file {name!r}"))


def suffix_of(path: Path) -> str:
    """Return the suffix that says how to read a file: in small letters, not of its compression."""
    *_, last = ["", *(suffix.lower() for suffix in path.suffixes)]
    return suffix_of(path.with_suffix("")) if last in COMPRESSED else last


def read_table(path: Path, subject: str) -> Iterable[tuple[int, Row]]:
    """Yield numbered rows, or why one is broken; raise InputError for an unreadable file."""
    suffix = suffix_of(path)
    if suffix not in ("", *SUFFIXES):
        raise InputError(
            f"{subject}: must end in {', '.join(SUFFIXES)}, perhaps with {', '.join(COMPRESSED)}"
        )
    if suffix in ARROW:
        return _arrow(path, subject)
    text = _read(path, subject).removeprefix(codecs.BOM_UTF8)
    if text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise InputError(f"{subject} begins with the byte order mark of UTF-16; must be UTF-8")
    if suffix in CSV:
        return _csv(text, subject, CSV[suffix])
    return _json_array(text, subject) if text.lstrip()[:1] == b"[" else _json_lines(text)


def _read(path: Path, subject: str) -> bytes:
    import pyarrow

    try:
        if (compression := COMPRESSED.get(path.suffix.lower())) is None:
            return path.read_bytes()
        with pyarrow.input_stream(str(path), compression=compression) as file:
            content: bytes = file.read()
        return content
    except OSError as error:
        raise InputError(f"{subject} cannot be read: {error}") from error


def _csv(text: bytes, subject: str, delimiter: str) -> Iterator[tuple[int, Row]]:
    """Yield rows of texts; an empty field is None."""
    from actors.sources.arrow_rows import refuse_twice

    csv.field_size_limit(LONGEST_FIELD)
    number = 0
    try:
        lines = csv.reader(StringIO(text.decode(), newline=""), delimiter=delimiter, strict=True)
        names = next(lines, [])
        refuse_twice(names, subject)
        if len(names) == 1 and (wrong := {*";,|\t"} & {*names[0]}):
            raise InputError(
                f"{subject}: its fields are separated by {min(wrong)!r}, must be by {delimiter!r}"
            )
        for number, fields in enumerate(filter(None, lines), 1):
            if len(fields) == len(names):
                yield number, dict(zip(names, (field or None for field in fields), strict=True))
            else:
                yield number, ValueError(f"has {len(fields)} fields, the header {len(names)}")
    except UnicodeDecodeError as error:
        raise InputError(f"{subject} is not UTF-8: {error}") from None
    except csv.Error as error:
        raise InputError(f"{subject} cannot be read after row {number}: {error}") from None


def _json_array(text: bytes, subject: str) -> Iterator[tuple[int, Row]]:
    rows: Any = _json(text)
    if isinstance(rows, ValueError):
        raise InputError(f"{subject} begins with [ and is no array of JSON: {rows}")
    yield from enumerate(rows, 1)


def _json_lines(text: bytes) -> Iterator[tuple[int, Row]]:
    lines = text.split(b"\n")
    if lines[0].strip() == b"{" and isinstance(row := _json(text), dict):  # over several lines
        lines = []
        yield 1, row
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield number, _json(line)


def _json(text: bytes) -> Row:
    try:
        row: Row = json.loads(text.decode("utf-8"), object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        return ValueError(f"not UTF-8: {error}")
    except json.JSONDecodeError as error:
        mend = r'; a backslash is written twice, as in "\\frac"' if "escape" in error.msg else ""
        return ValueError(f"not JSON: {error.msg} at character {error.pos + 1}{mend}")
    except (ValueError, RecursionError) as error:
        return ValueError(f"not JSON: {error}")
    return row


def _object(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    read = dict(fields)
    if len(read) < len(fields):
        names = [name for name, _ in fields]
        raise ValueError(f"has {next(n for n in names if names.count(n) > 1)!r} twice")
    return read


def _arrow(path: Path, subject: str) -> Iterator[tuple[int, Row]]:
    import pyarrow
    from pyarrow import ipc, parquet

    from actors.sources.arrow_rows import rows_of

    try:
        with pyarrow.memory_map(str(path)) as file:
            if suffix_of(path) == ".parquet":
                table = parquet.ParquetFile(file).read()
            else:
                try:
                    table = ipc.open_file(file).read_all()
                except pyarrow.ArrowInvalid:
                    file.seek(0)
                    table = ipc.open_stream(file).read_all()
    except (OSError, UnicodeError, pyarrow.ArrowException) as error:
        raise InputError(f"{subject} cannot be read: {error}") from error
    yield from enumerate(rows_of(table, subject), 1)

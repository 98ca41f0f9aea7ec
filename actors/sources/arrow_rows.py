"""Rows of Arrow tables as Python values, with the numbers that their columns stand for."""

import json
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pyarrow as pa

from actors.sources.rows import Row, number_text
from headway.errors import InputError

ROWS = 1024
"""Rows that are converted at once."""


def rows_of(table: pa.Table, subject: str) -> Iterator[Row]:
    """Yield the rows of a table, or why one is broken; `subject` begins the message of an error.

    Floats of 16 and 32 bits become the shortest decimal that stands for them, as 0.1, and decimals
    their text; JSON is read. Raises InputError where two columns have one name.
    """
    refuse_twice(table.column_names, subject)
    for batch in table.to_batches(max_chunksize=ROWS):
        try:
            yield from _plain(batch)
        except UnicodeDecodeError:
            for index in range(batch.num_rows):
                try:
                    yield from _plain(batch.slice(index, 1))
                except UnicodeDecodeError as error:
                    yield ValueError(f"not UTF-8: {error}")


def refuse_twice(names: list[str], subject: str) -> None:
    """Raise InputError if two columns have one name: only one could be read."""
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(f"{subject} has two columns {twice[0]!r}; rename one of them")


def _plain(batch: pa.RecordBatch) -> list[Row]:
    rows: list[Row] = batch.to_pylist()
    kind = pa.struct([*batch.schema])
    if any(name in str(kind) for name in ("float", "decimal", "arrow.json")):
        return [_value(row, kind) for row in rows]
    return rows


def _value(value: Any, kind: pa.DataType) -> Any:
    """Return a value of `to_pylist` whose numbers are as they are written."""
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        kind = kind.value_type
    if isinstance(value, Decimal):
        return number_text(value)
    if isinstance(value, str) and isinstance(kind, pa.JsonType):
        return json.loads(value)
    if isinstance(value, float) and kind in (pa.float16(), pa.float32()):
        return float(str(kind.to_pandas_dtype()(value)))
    if isinstance(value, dict):
        return {field.name: _value(value[field.name], field.type) for field in kind}
    if isinstance(value, list) and pa.types.is_map(kind):
        return [(key, _value(item, kind.item_type)) for key, item in value]
    if isinstance(value, list):
        return [_value(item, kind.value_type) for item in value]
    return value

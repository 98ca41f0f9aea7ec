"""Rollout groups as Arrow: a record batch of G rows, an IPC stream on the wire and in the journal.

`encode` refuses to write what `decode` would refuse to read. Columns are checked as arrays.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from queues.errors import SchemaError
from queues.records import SHAPING, FinishReason, Payload, Rollout, RolloutGroup, Summary
from queues.schema_checks import (
    GROUP_COLUMNS,
    OPTIONAL_FIELDS,
    TOKEN_COLUMNS,
    check_values,
    flat,
    lengths_of,
    optional_fields,
)

SCHEMA_VERSION = 2
VERSION_KEY = b"headway.schema_version"
SMALL_BYTES = 2**17
"""Payloads up to this size, in bytes, are checked together."""

_TIMESTAMP = pa.timestamp("us", tz="UTC")
SCHEMA = pa.schema(
    [
        pa.field(name, kind, nullable=False)
        for name, kind in (
            ("prompt_id", pa.string()),
            ("group_id", pa.string()),
            ("attempt", pa.int32()),
            ("sample_index", pa.int32()),
            ("token_ids", pa.list_(pa.int32())),
            ("prompt_length", pa.int32()),
            ("loss_mask", pa.list_(pa.bool_())),
            ("behavior_logprobs", pa.list_(pa.float32())),
            ("versions", pa.list_(pa.int32())),
            ("reward", pa.float64()),
            ("reward_parts", pa.map_(pa.string(), pa.float64())),
            ("finish_reason", pa.string()),
            ("turns", pa.int32()),
            ("environment", pa.string()),
            ("engine_id", pa.string()),
            ("created_at", _TIMESTAMP),
            ("finished_at", _TIMESTAMP),
            ("metadata", pa.string()),
        )
    ],
    metadata={VERSION_KEY: str(SCHEMA_VERSION).encode()},
)


def encode(group: RolloutGroup) -> bytes:
    """Encode a group as an Arrow IPC stream; SchemaError names the field that breaks the schema."""
    batch = record_batch(SCHEMA, [_row(group, rollout) for rollout in group.rollouts])
    _validate_whole(batch)
    check_values(batch, [batch.num_rows])
    return stream_of(batch)


def record_batch(schema: pa.Schema, rows: Sequence[Mapping[str, Any]]) -> pa.RecordBatch:
    """Return rows as Arrow; SchemaError names a field that is not of its type."""
    columns = []
    for field in schema:
        try:
            columns.append(pa.array([row[field.name] for row in rows], type=field.type))
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise SchemaError(f"{field.name}: not {field.type}: {error}") from error
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def stream_of(batch: pa.RecordBatch) -> bytes:
    """Return a record batch as an IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def decode(payload: Payload) -> RolloutGroup:
    """Decode a payload that `encode` made; SchemaError for any other, or values out of range."""
    batch = read_batch(payload)
    rows = batch.to_pylist(maps_as_pydicts="strict")
    return RolloutGroup(
        **{name: rows[0][name] for name in GROUP_COLUMNS},
        rollouts=[_rollout(row) for row in rows],
    )


def decode_arrays(payloads: Sequence[Payload]) -> list[RolloutGroup]:
    """Decode payloads, with read-only arrays as per-token columns; raises as `decode` does.

    No Python object is made of any token, and small groups are decoded together.
    """
    if _small(payloads):
        with suppress(SchemaError, pa.ArrowException):  # then one by one, to name the group
            return _groups(*_read_together(payloads))
    batches = map(read_batch, payloads)
    return [group for batch in batches for group in _groups(batch, [batch.num_rows])]


def _groups(batch: pa.RecordBatch, sizes: Sequence[int]) -> list[RolloutGroup]:
    """Decode consecutive groups of these numbers of rows, with arrays as per-token columns."""
    per_token = ("token_ids", *TOKEN_COLUMNS)
    columns = [name for name in SCHEMA.names if name not in per_token]
    rows = batch.select(columns).to_pylist(maps_as_pydicts="strict")
    ends = np.cumsum(lengths_of(batch, "token_ids"))[:-1]
    tokens = {name: np.split(flat(batch, name), ends) for name in per_token}
    groups, first = [], 0
    for size in sizes:
        group = {name: rows[first][name] for name in GROUP_COLUMNS}
        rollouts = [
            _rollout(rows[i] | {name: tokens[name][i] for name in per_token})
            for i in range(first, first + size)
        ]
        groups.append(RolloutGroup(**group, rollouts=rollouts))
        first += size
    return groups


def to_arrays(payloads: Sequence[Payload]) -> list[Any]:
    """Return payloads in the form that Ray's object store transfers without copies.

    `memoryview(array)` is a payload again.
    """
    return [np.frombuffer(payload, dtype=np.uint8) for payload in payloads]


def read_batch(payload: Payload) -> pa.RecordBatch:
    """Return the validated record batch in a payload; raises as `decode` does."""
    batch = _parse(payload)
    try:
        check_values(batch, [batch.num_rows])
    except SchemaError as error:
        raise SchemaError(f"{error} (group {batch.column('group_id')[0]})") from error
    return batch


def summarize(payload: Payload) -> Summary:
    """Validate and summarise a payload, without making a Python object of every token."""
    batch = read_batch(payload)
    return _summaries(batch, [batch.num_rows])[0]


def summarize_many(payloads: Sequence[Payload]) -> list[Summary | SchemaError]:
    """Return for each payload what `summarize` returns or raises.

    Small groups are validated together, since the calls cost more than their rows.
    """
    if _small(payloads):
        with suppress(SchemaError, pa.ArrowException):  # then one by one, to find the invalid
            return [*_summaries(*_read_together(payloads))]
    results: list[Summary | SchemaError] = []
    for payload in payloads:
        try:
            results.append(summarize(payload))
        except SchemaError as error:
            results.append(error)
    return results


def _small(payloads: Sequence[Payload]) -> bool:
    """Return True if the payloads are several and small, so that they are read together."""
    return len(payloads) > 1 and max(map(len, payloads)) <= SMALL_BYTES


def _read_together(payloads: Sequence[Payload]) -> tuple[pa.RecordBatch, list[int]]:
    """Return one validated record batch of all groups, and the number of rows of each."""
    batches = [_parse(payload) for payload in payloads]
    sizes = [batch.num_rows for batch in batches]
    together = pa.concat_batches(batches)
    check_values(together, sizes)
    return together, sizes


def _summaries(batch: pa.RecordBatch, sizes: Sequence[int]) -> list[Summary]:
    """Summarise consecutive groups of these numbers of rows."""
    lengths = lengths_of(batch, "token_ids")
    ends = np.cumsum(lengths)
    mask, versions = flat(batch, "loss_mask"), flat(batch, "versions")
    rewards = batch.column("reward").to_numpy()
    shaping = [
        sum(value for name, value in parts if name in SHAPING)
        for parts in batch.column("reward_parts").to_pylist()
    ]
    names = {name: batch.column(name).to_pylist() for name in GROUP_COLUMNS}
    summaries, first = [], 0
    for size in sizes:
        rows = slice(first, first + size)
        tokens = slice(ends[first] - lengths[first], ends[first + size - 1])
        sampled = int(np.count_nonzero(mask[tokens]))
        summaries.append(
            Summary(
                **{name: values[first] for name, values in names.items()},
                rollouts=size,
                tokens=sampled,
                reward=float(rewards[rows].mean()),
                task_rewards=tuple((rewards[rows] - shaping[rows]).tolist()),
                # Tokens that are not sampled are -1, the largest unsigned number.
                oldest_version=int(versions[tokens].view(np.uint32).min()) if sampled else None,
                newest_version=int(versions[tokens].max()) if sampled else None,
            )
        )
        first += size
    return summaries


def write_parquet(groups: Iterable[tuple[bytes, str, int | None]], file: BinaryIO) -> int:
    """Write groups to Parquet, one row per rollout; return the number of rows.

    A group is its payload, its state, and the version whose batch trained it (None: untrained).
    """
    schema = SCHEMA.append(pa.field("state", pa.string(), nullable=False)).append(
        pa.field("trained_version", pa.int32())
    )
    rows = 0
    with pq.ParquetWriter(file, schema) as writer:
        for payload, state, trained_version in groups:
            batch = read_batch(payload)
            states = pa.array([state] * batch.num_rows, pa.string())
            versions = pa.array([trained_version] * batch.num_rows, pa.int32())
            columns = [*batch.columns, states, versions]
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
            rows += batch.num_rows
    return rows


def _row(group: RolloutGroup, rollout: Rollout) -> dict[str, Any]:
    values: dict[str, Any] = {
        name: getattr(group if name in GROUP_COLUMNS else rollout, name)
        for name in SCHEMA.names
        if name != "metadata"
    }
    for name in ("created_at", "finished_at"):
        if values[name].tzinfo is None:
            raise SchemaError(f"{name}: {values[name]} has no time zone, must be in UTC")
    values["finish_reason"] = str(rollout.finish_reason)
    values["reward_parts"] = dict(rollout.reward_parts)
    optional = {name: getattr(rollout, name) for name in OPTIONAL_FIELDS}
    optional["left_out"] = dict(rollout.left_out)
    try:
        values["metadata"] = json.dumps(
            {name: x for name, x in optional.items() if x not in (None, (), [], {})}
        )
    except (TypeError, ValueError) as error:
        raise SchemaError(f"metadata: not JSON: {error}") from error
    return values


def _rollout(row: dict[str, Any]) -> Rollout:
    for name in GROUP_COLUMNS:
        del row[name]
    row["finish_reason"] = FinishReason(row["finish_reason"])
    return Rollout(**row | optional_fields(row.pop("metadata")))


def _check_schema(schema: pa.Schema) -> None:
    if schema.equals(SCHEMA, check_metadata=True):
        return
    version = (schema.metadata or {}).get(VERSION_KEY, b"none").decode(errors="replace")
    if version != str(SCHEMA_VERSION):
        raise SchemaError(f"{VERSION_KEY.decode()}: found {version}, must be {SCHEMA_VERSION}")
    if schema.names != SCHEMA.names:
        missing = [name for name in SCHEMA.names if name not in schema.names]
        if missing:
            raise SchemaError(f"{missing[0]}: column is missing")
        extra = sorted(set(schema.names) - set(SCHEMA.names))
        raise SchemaError(f"{', '.join(extra) or 'columns'}: unknown, repeated or out of order")
    for column, field in zip(schema, SCHEMA, strict=True):
        if column.type != field.type:
            raise SchemaError(f"{field.name}: found {column.type}, must be {field.type}")


def _parse(payload: Payload) -> pa.RecordBatch:
    """Return the record batch in a payload; schema and buffers are checked, values are not."""
    try:
        with pa.ipc.open_stream(payload) as reader:
            _check_schema(reader.schema)
            batches = list(reader)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise SchemaError(f"payload: not an Arrow IPC stream: {error}") from error
    if len(batches) != 1:
        raise SchemaError(f"payload: {len(batches)} record batches, must be 1, a whole group")
    _validate_whole(batches[0])
    return batches[0]


def _validate_whole(batch: pa.RecordBatch) -> None:
    if batch.num_rows == 0:
        raise SchemaError("rollouts: none, must be at least 1")
    try:
        batch.validate(full=True)
    except pa.ArrowException as error:
        raise SchemaError(f"payload: damaged: {error}") from error

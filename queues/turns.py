"""Turns as Arrow: a record batch of one row, an IPC stream in the ledger (`WorkQueue.note`)."""

import math

import pyarrow as pa

from queues.errors import SchemaError
from queues.records import FinishReason, Payload, Turn
from queues.schema import record_batch, stream_of

VERSION_KEY = b"headway.turn_version"
_IDS = pa.list_(pa.int32())
SCHEMA = pa.schema(
    [
        pa.field(name, kind, nullable=False)
        for name, kind in (
            ("number", pa.int32()),
            ("parent", pa.int32()),
            ("shared", pa.int32()),
            ("injected", _IDS),
            ("token_ids", _IDS),
            ("behavior_logprobs", pa.list_(pa.float32())),
            ("versions", _IDS),
            ("finish_reason", pa.string()),
            ("cache_salt", pa.string()),
        )
    ],
    metadata={VERSION_KEY: b"1"},
)


def encode_turn(turn: Turn) -> bytes:
    """Encode a turn as an Arrow IPC stream; SchemaError names the field that breaks a rule.

    Log-probabilities become float32, as in `queues.schema`.
    """
    batch = record_batch(SCHEMA, [{name: getattr(turn, name) for name in SCHEMA.names}])
    _turn(batch)
    return stream_of(batch)


def decode_turn(payload: Payload) -> Turn:
    """Decode a payload that `encode_turn` made; SchemaError for any other."""
    try:
        with pa.ipc.open_stream(payload) as reader:
            if not reader.schema.equals(SCHEMA, check_metadata=True):
                raise SchemaError("payload: not a turn of this version")
            batch = pa.Table.from_batches([*reader], SCHEMA).combine_chunks()
            batch.validate(full=True)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise SchemaError(f"payload: not an Arrow IPC stream: {error}") from error
    return _turn(batch)


def _turn(batch: pa.RecordBatch | pa.Table) -> Turn:
    """Return the turn of a row whose types are right; SchemaError for values out of range."""
    if batch.num_rows != 1:
        raise SchemaError(f"payload: {batch.num_rows} rows, must be 1, a turn")
    (row,) = batch.to_pylist()
    for name, value in row.items():
        if value is None or (isinstance(value, list) and None in value):
            raise SchemaError(f"{name}: must not be null")
    if row["finish_reason"] not in [*map(str, FinishReason)]:
        raise SchemaError(f"finish_reason: {row['finish_reason']}, must be of {[*FinishReason]}")
    row["finish_reason"] = FinishReason(row["finish_reason"])
    turn = Turn(**row)
    sampled, as_many = len(turn.token_ids), "must be as many as token_ids"
    rules = (
        ("number", turn.number >= 0, "must not be negative"),
        ("parent", -1 <= turn.parent < turn.number, "must be an earlier turn, or -1"),
        ("shared", turn.shared >= 0, "must not be negative"),
        ("shared", turn.parent >= 0 or not turn.shared, "must be 0 without a parent"),
        ("injected", min(turn.injected, default=0) >= 0, "must not be negative"),
        ("token_ids", min(turn.token_ids, default=0) >= 0, "must not be negative"),
        ("versions", min(turn.versions, default=0) >= 0, "must not be negative"),
        ("versions", len(turn.versions) == sampled, as_many),
        ("behavior_logprobs", len(turn.behavior_logprobs) == sampled, as_many),
        ("behavior_logprobs", all(map(math.isfinite, turn.behavior_logprobs)), "must be finite"),
    )
    for name, valid, rule in rules:
        if not valid:
            raise SchemaError(f"{name}: {str(row[name])[:80]}, {rule}")
    return turn

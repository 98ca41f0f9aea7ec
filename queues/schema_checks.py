"""Checks of the values in a record batch of rollouts, column by column, as arrays."""

import json
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from queues.errors import SchemaError
from queues.records import FinishReason, Segment, TurnReward
from queues.segments import are_segments

GROUP_COLUMNS = ("group_id", "prompt_id", "attempt")
"""Columns with one value in all rows of a group."""
TOKEN_COLUMNS = ("loss_mask", "behavior_logprobs", "versions")
"""Columns with an entry for each of `token_ids`."""
LOGPROB_TOLERANCE = 1e-4
"""Log-probabilities may exceed 0 by this much: engines round."""
OPTIONAL_FIELDS = ("turn_rewards", "baseline_reward", "segments", "left_out")
"""Fields of a rollout in the JSON of its metadata, where they hold something."""
_METADATA_RULE = (
    "must be a JSON object with nothing but turn_rewards, a list of [index of the turn's last "
    "token, finite reward], baseline_reward, a finite number, segments and left_out"
)
_SEGMENTS_RULE = (
    "must be a list of [start, parent, prefix]: ascending starts from the end of the prompt on, an "
    "earlier segment, and at most the length of its path; 0 only where the start is not sampled"
)
_LEFT_OUT_RULE = "must be numbers of tokens by reason, integers from 0"
_LATEST = int(datetime(9999, 12, 31, tzinfo=UTC).timestamp()) * 10**6
"""In microseconds; Python's datetime ends there."""


def check_values(batch: pa.RecordBatch, sizes: Sequence[int]) -> None:
    """Check the values of consecutive groups of these sizes; SchemaError names the field."""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        for values in (column, _entries(column)):
            if values.null_count:
                _require(batch, name, values.is_valid(), "must not be null")
    _check_groups(batch, sizes)
    _check_tokens(batch)
    _check_rows(batch)


def _check_groups(batch: pa.RecordBatch, sizes: Sequence[int]) -> None:
    columns = {name: batch.column(name).to_pylist() for name in (*GROUP_COLUMNS, "sample_index")}
    first = 0
    for size in sizes:
        different = {name: {*column[first : first + size]} for name, column in columns.items()}
        first += size
        index = different.pop("sample_index")
        for name, values in different.items():
            if len(values) > 1:
                raise SchemaError(f"{name}: {sorted(values)} must be one for the whole group")
        if len(index) < size:
            raise SchemaError(f"sample_index: {sorted(index)} must be {size}, all different")
    for name, least in (("attempt", 1), ("sample_index", 0)):
        values = batch.column(name).to_numpy()
        _require(batch, name, values >= least, f"must be at least {least}")


def _check_tokens(batch: pa.RecordBatch) -> None:
    lengths = lengths_of(batch, "token_ids")
    for name in TOKEN_COLUMNS:
        entries = lengths_of(batch, name)
        for row in np.flatnonzero(entries != lengths):
            rule = f"must be {lengths[row]}, the length of token_ids"
            raise SchemaError(f"{name}: row {row} has {entries[row]} entries, {rule}")
    prompt = batch.column("prompt_length").to_numpy()
    inside = (prompt >= 1) & (prompt <= lengths)
    _require(batch, "prompt_length", inside, "must be from 1 to the length of token_ids")

    mask = flat(batch, "loss_mask")
    logprobs = flat(batch, "behavior_logprobs")
    versions = flat(batch, "versions")
    starts = np.cumsum(lengths) - lengths
    edges = np.stack([starts, starts + prompt], axis=1).ravel()
    in_prompt = np.logical_or.reduceat(mask, edges[edges < mask.size])[::2]
    _require(batch, "token_ids", flat(batch, "token_ids") >= 0, "must not be negative")
    _require(batch, "loss_mask", ~in_prompt, "must be false in the prompt")
    name = "behavior_logprobs"
    _require(batch, name, np.isfinite(logprobs), "must be finite")
    _require(batch, name, logprobs <= LOGPROB_TOLERANCE, "must not exceed 0")
    _require(batch, name, (logprobs == 0) | mask, "must be 0 where not sampled")
    _require(batch, "versions", (versions >= 0) | ~mask, "must not be negative where sampled")
    _require(batch, "versions", (versions == -1) | mask, "must be -1 where not sampled")


def _check_rows(batch: pa.RecordBatch) -> None:
    _require(batch, "reward", np.isfinite(batch.column("reward").to_numpy()), "must be finite")
    _require(batch, "reward_parts", np.isfinite(flat(batch, "reward_parts")), "must be finite")
    unique = [len(dict(row)) == len(row) for row in batch.column("reward_parts").to_pylist()]
    _require(batch, "reward_parts", unique, "must have different keys")
    _require(batch, "turns", batch.column("turns").to_numpy() >= 1, "must be at least 1")
    reasons = [*map(str, FinishReason)]
    allowed = [x in reasons for x in batch.column("finish_reason").to_pylist()]
    _require(batch, "finish_reason", allowed, f"must be of {reasons}")
    created, finished = (
        batch.column(name).cast(pa.int64()).to_numpy() for name in ("created_at", "finished_at")
    )
    _require(batch, "created_at", created >= 0, "must not be before 1970")
    _require(batch, "finished_at", finished >= created, "must not be before created_at")
    _require(batch, "finished_at", finished <= _LATEST, "must not be after 9999")
    _check_metadata(batch)


def _check_metadata(batch: pa.RecordBatch) -> None:
    masks = np.split(flat(batch, "loss_mask"), np.cumsum(lengths_of(batch, "loss_mask"))[:-1])
    columns = (batch.column(name).to_pylist() for name in ("metadata", "prompt_length"))
    for row, (metadata, prompt, mask) in enumerate(zip(*columns, masks, strict=True)):
        if broken := _broken_field(metadata, prompt, mask):
            raise SchemaError(f"{broken[0]}: row {row} is {metadata[:80]}, {broken[1]}")


def optional_fields(metadata: str) -> dict[str, Any]:
    """Return the fields of a rollout in the JSON of its metadata; ValueError or TypeError."""
    fields = json.loads(metadata)
    if not isinstance(fields, dict) or fields.keys() - {*OPTIONAL_FIELDS}:
        raise ValueError("not the optional fields of a rollout")
    for name, kind in (("turn_rewards", TurnReward), ("segments", Segment)):
        if name in fields:
            fields[name] = tuple(kind(*entry) for entry in fields[name])
    return fields


def _broken_field(
    metadata: str, prompt_length: int, loss_mask: npt.NDArray[np.bool_]
) -> tuple[str, str] | None:
    """Return the name and the rule of a field that breaks it; None for valid metadata."""
    name, rule = "metadata", _METADATA_RULE
    try:
        fields = optional_fields(metadata)
        turns = fields.get("turn_rewards", ())
        rewards = [turn.reward for turn in turns] + [fields.get("baseline_reward", 0.0)]
        ends = [turn.end for turn in turns]
        inside = all(isinstance(end, int) and 0 <= end < len(loss_mask) for end in ends)
        if not inside or not all(map(math.isfinite, rewards)):
            return name, rule
        name, rule = "segments", _SEGMENTS_RULE
        if not are_segments(fields.get("segments", ()), prompt_length, loss_mask):
            return name, rule
        name, rule = "left_out", _LEFT_OUT_RULE
        counts = fields.get("left_out", {}).values()
        valid = all(type(count) is int and count >= 0 for count in counts)
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return name, rule
    return None if valid else (name, rule)


def _require(batch: pa.RecordBatch, name: str, valid: npt.ArrayLike, rule: str) -> None:
    """Refuse the first invalid value of a column: of its rows, or of all entries of its lists."""
    valid = np.asarray(valid)
    if valid.all():
        return
    values = batch.column(name).to_numpy(zero_copy_only=False)
    row = index = int(np.argmin(valid))
    if len(valid) != len(values):
        values = flat(batch, name)
        row = int(np.searchsorted(np.cumsum(lengths_of(batch, name)), index, side="right"))
    raise SchemaError(f"{name}: row {row} is {str(values[index])[:80]}, {rule}")


def _entries(column: pa.Array) -> pa.Array:
    """Return the entries of all lists, or the values of all maps, or the column itself."""
    if pa.types.is_map(column.type):
        return column.items
    return column.flatten() if pa.types.is_list(column.type) else column


def lengths_of(batch: pa.RecordBatch, name: str) -> npt.NDArray[np.int64]:
    """Return the entries per row of a list or map column [R], int64."""
    return np.diff(batch.column(name).offsets).astype(np.int64)


def flat(batch: pa.RecordBatch, name: str) -> npt.NDArray[Any]:
    """Return all entries of a list or map column, row after row [sum of lengths]."""
    values: npt.NDArray[Any] = _entries(batch.column(name)).to_numpy(zero_copy_only=False)
    return values

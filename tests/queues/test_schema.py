"""The Arrow schema: what goes in comes out, and what is wrong is refused by its field's name."""

import contextlib
from dataclasses import replace
from datetime import datetime, timedelta

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from queues.errors import SchemaError
from queues.records import FinishReason, RolloutGroup, Segment, Summary, TurnReward
from queues.schema import (
    SCHEMA,
    SMALL_BYTES,
    decode,
    decode_arrays,
    encode,
    read_batch,
    summarize,
    write_parquet,
)
from queues.segments import paths
from tests.property_examples import costly
from tests.queues.conftest import BEGIN, make_group, make_rollout

FINITE = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def rollouts(draw, index):
    prompt = draw(st.integers(1, 5))
    mask = [False] * prompt + draw(st.lists(st.booleans(), max_size=8))
    logprob = st.floats(-50, 0, width=32)
    return make_rollout(
        index,
        token_ids=[draw(st.integers(0, 2**31 - 1)) for _ in mask],
        prompt_length=prompt,
        loss_mask=mask,
        behavior_logprobs=[draw(logprob) if sampled else 0.0 for sampled in mask],
        versions=[draw(st.integers(0, 2**31 - 1)) if sampled else -1 for sampled in mask],
        reward=draw(FINITE),
        reward_parts=draw(st.dictionaries(st.text(), FINITE, max_size=3)),
        finish_reason=draw(st.sampled_from(FinishReason)),
        turns=draw(st.integers(1, 9)),
        turn_rewards=tuple(
            draw(st.lists(st.builds(TurnReward, st.integers(0, len(mask) - 1), FINITE), max_size=3))
        ),
        baseline_reward=draw(st.none() | FINITE),
        segments=draw(forks(prompt, mask)),
        left_out=draw(st.dictionaries(st.text(), st.integers(0, 2**40), max_size=2)),
    )


WRONG = [
    [(2, 0, 1)],  # in the prompt
    [(5, 0, 1)],  # beyond the row
    [(4, 0, 1), (4, 0, 1)],
    [(4, 0, 1), (3, 0, 1)],
    [(4, 1, 1)],  # its own parent
    [(4, -1, 1)],
    [(4, 0, 5)],  # longer than the path of its parent
    [(4, 0, -1)],
    [(4, 0, 0)],  # begins with a sampled token
    [(3, 0, 2), (4, 1, 4)],
    [(4.0, 0, 1)],
    [(4, False, 1)],
    [("4", 0, 1)],
]
"""Segments that no rollout of three prompt tokens and two sampled ones can have."""


@st.composite
def forks(draw, prompt, mask):
    """Draw further segments of a rollout with this mask."""
    starts = draw(st.sets(st.integers(prompt, len(mask) - 1), max_size=4)) if mask[prompt:] else ()
    drawn, lengths, begun = [], [], 0
    for start in sorted(starts):
        lengths.append(start - begun + (drawn[-1].prefix if drawn else 0))
        parent = draw(st.integers(0, len(drawn)))
        prefix = draw(st.integers(int(mask[start]), lengths[parent]))
        drawn.append(Segment(start, parent, prefix))
        begun = start
    return tuple(drawn)


@st.composite
def groups(draw):
    return RolloutGroup(
        group_id=draw(st.text()),
        prompt_id=draw(st.text()),
        attempt=draw(st.integers(1, 9)),
        rollouts=[draw(rollouts(index)) for index in range(draw(st.integers(1, 3)))],
    )


@costly
@given(groups())
def test_a_group_survives_the_wire_unchanged(group):
    assert decode(encode(group)) == group


@pytest.mark.parametrize("small_bytes", [SMALL_BYTES, 0], ids=["together", "one by one"])
@costly
@given(several=st.lists(groups(), max_size=3))
def test_arrays_of_groups_hold_what_their_lists_do(several, small_bytes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("queues.schema.SMALL_BYTES", small_bytes)
        decoded = decode_arrays([encode(group) for group in several])
    lists = {"token_ids", "loss_mask", "behavior_logprobs", "versions"}
    for group in decoded:
        for rollout in group.rollouts:
            assert all(isinstance(getattr(rollout, name), np.ndarray) for name in lists)
    as_lists = [
        replace(
            group,
            rollouts=[
                replace(rollout, **{name: getattr(rollout, name).tolist() for name in lists})
                for rollout in group.rollouts
            ],
        )
        for group in decoded
    ]
    assert as_lists == several


def test_columns_are_these_in_this_order():
    assert [f"{field.name} {field.type}" for field in SCHEMA] == [
        "prompt_id string",
        "group_id string",
        "attempt int32",
        "sample_index int32",
        "token_ids list<item: int32>",
        "prompt_length int32",
        "loss_mask list<item: bool>",
        "behavior_logprobs list<item: float>",
        "versions list<item: int32>",
        "reward double",
        "reward_parts map<string, double>",
        "finish_reason string",
        "turns int32",
        "environment string",
        "engine_id string",
        "created_at timestamp[us, tz=UTC]",
        "finished_at timestamp[us, tz=UTC]",
        "metadata string",
    ]
    assert SCHEMA.metadata == {b"headway.schema_version": b"2"}


def test_a_summary_counts_sampled_tokens_and_spans_their_versions():
    group = make_group(
        rollouts=[
            make_rollout(0, sampled=[4, 5, 5], reward=0.0),
            make_rollout(1, sampled=[3], reward=1.0),
        ]
    )
    assert summarize(encode(group)) == Summary(
        group_id="g00000001", prompt_id="sums/0/0", attempt=1, rollouts=2, tokens=4, reward=0.5,
        task_rewards=(0.0, 1.0), oldest_version=3, newest_version=5,
    )  # fmt: skip
    nothing = summarize(encode(make_group(rollouts=[make_rollout(0, sampled=[])])))
    assert (nothing.tokens, nothing.oldest_version, nothing.newest_version) == (0, None, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_mask": [False] * 4}, "loss_mask: row 1 has 4 entries, must be 5"),
        ({"behavior_logprobs": [0.0] * 6}, "behavior_logprobs: row 1 has 6 entries, must be 5"),
        ({"versions": []}, "versions: row 1 has 0 entries, must be 5"),
        ({"token_ids": [0, 1, 2, 3, -4]}, "token_ids: row 1 is -4, must not be negative"),
        ({"token_ids": [0, 1, 2, 3, 2**31]}, "token_ids: not list"),
        ({"token_ids": [0, 1, 2, 3, None]}, "token_ids: row 1 is nan, must not be null"),
        ({"prompt_length": 0}, "prompt_length: row 1 is 0, must be from 1 to"),
        ({"prompt_length": 6}, "prompt_length: row 1 is 6, must be from 1 to"),
        ({"prompt_length": 4}, r"loss_mask: row 1 is \[False .*\], must be false in the prompt"),
        ({"behavior_logprobs": [0, 0, 0, -1, 0.01]}, "behavior_logprobs: row 1 is 0.01,"),
        ({"behavior_logprobs": [0, 0, 0, -1, float("nan")]}, "behavior_logprobs: row 1 is nan,"),
        ({"behavior_logprobs": [-1, 0, 0, -1, -1]}, "behavior_logprobs: row 1 is -1.0,"),
        ({"versions": [-1, -1, -1, 0, -1]}, "versions: row 1 is -1, must not be negative where"),
        ({"versions": [-1, -1, 0, 0, 0]}, "versions: row 1 is 0, must be -1 where not sampled"),
        ({"reward": float("inf")}, "reward: row 1 is inf, must be finite"),
        ({"reward": None}, "reward: row 1 is nan, must not be null"),
        ({"reward_parts": {"a": float("nan")}}, "reward_parts: row 1 is .*nan.*, must be finite"),
        ({"reward_parts": {"a": None}}, "reward_parts: row 1 is .*None.*, must not be null"),
        ({"finish_reason": "bored"}, "finish_reason: row 1 is bored, must be of"),
        ({"turns": 0}, "turns: row 1 is 0, must be at least 1"),
        ({"sample_index": 0}, r"sample_index: \[0\] must be 2, all different"),
        ({"sample_index": -1}, "sample_index: row 1 is -1, must be at least 0"),
        ({"created_at": datetime(2026, 1, 1)}, "created_at: .* has no time zone"),
        ({"finished_at": BEGIN - timedelta(1)}, "finished_at: row 1 is 2026-.*, must not be"),
        ({"baseline_reward": object()}, "metadata: not JSON"),
        ({"baseline_reward": float("nan")}, "metadata: row 1 is .*NaN.*, must be a JSON object"),
        ({"turn_rewards": [(5, 1.0)]}, "metadata: row 1 is .*5, 1.0.*, must be a JSON object"),
        ({"turn_rewards": [(2.0, 1.0)]}, "metadata: row 1 is .*2.0, 1.0.*, must be a JSON object"),
        ({"turn_rewards": [(4, None)]}, "metadata: row 1 is .*4, null.*, must be a JSON object"),
        ({"engine_id": 3}, "engine_id: not string"),
        *(({"segments": segments}, "segments: row 1 is .*, must be a list") for segments in WRONG),
        ({"segments": [(3, 0)]}, "metadata: row 1 is .*, must be a JSON object"),
        ({"segments": 5}, "metadata: row 1 is .*, must be a JSON object"),
        ({"left_out": {"undelivered": -1}}, "left_out: row 1 is .*-1.*, must be numbers of tokens"),
        ({"left_out": {"undelivered": 1.0}}, "left_out: row 1 is .*1.0.*, must be numbers"),
        ({"left_out": {"undelivered": True}}, "left_out: row 1 is .*true.*, must be numbers"),
    ],
)
def test_a_rollout_out_of_range_is_refused(changes, message):
    wrong = replace(make_rollout(1), **changes)
    with pytest.raises(SchemaError, match=f"^{message}"):
        encode(make_group(rollouts=[make_rollout(0), wrong]))


def test_an_invalid_value_among_several_groups_is_named_with_its_row_and_group():
    good = encode(make_group(3))
    for read in (decode_arrays, lambda payloads: decode(payloads[1])):
        with pytest.raises(SchemaError, match=r"^metadata: row 1 is .* \(group g00000001\)$"):
            read([good, rewritten("metadata")])


def test_a_group_out_of_range_is_refused():
    with pytest.raises(SchemaError, match=r"^attempt: row 0 is 0, must be at least 1"):
        encode(make_group(attempt=0))
    with pytest.raises(SchemaError, match=r"^rollouts: none"):
        encode(make_group(rollouts=[]))


def payload_of(batches, schema):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return bytes(sink.getvalue())


def rewritten(change, metadata=None):
    """Return the payload of a good group with one column changed behind `encode`'s back."""
    (batch,) = pa.ipc.open_stream(encode(make_group()))
    table = pa.Table.from_batches([batch])
    if change == "drop":
        table = table.drop_columns(["turns"])
    elif change == "retype":
        table = table.set_column(12, "turns", table["turns"].cast(pa.int64()))
    elif change == "add":
        table = table.append_column("mood", pa.array(["fine", "fine"]))
    elif change == "mix":
        table = table.set_column(1, "group_id", pa.array(["g1", "g2"]))
    elif change == "metadata":
        table = table.set_column(17, "metadata", pa.array(["{}", "[]"]))
    table = table.replace_schema_metadata(SCHEMA.metadata if metadata is None else metadata)
    return payload_of(table.to_batches(), table.schema)


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"", "payload: not an Arrow IPC stream"),
        (b"\x00" * 100, "payload: not an Arrow IPC stream"),
        (encode(make_group())[:-200], "payload: not an Arrow IPC stream"),
        (payload_of([], SCHEMA), "payload: 0 record batches, must be 1"),
        (rewritten("drop"), "turns: column is missing"),
        (rewritten("retype"), "turns: found int64, must be int32"),
        (rewritten("add"), "mood: unknown"),
        (rewritten("mix"), r"group_id: \['g1', 'g2'\] must be one for the whole group"),
        (rewritten("metadata"), r"metadata: row 1 is \[\], must be a JSON object .* \(group g0"),
        (rewritten("", {}), "headway.schema_version: found none, must be 2"),
        (rewritten("", {b"headway.schema_version": b"1"}), "headway.schema_version: found 1"),
    ],
)
def test_a_foreign_payload_is_refused(payload, message):
    for read in (decode, summarize):
        with pytest.raises(SchemaError, match=f"^{message}"):
            read(payload)


@given(st.integers(0, 10_000), st.binary(min_size=1, max_size=8))
def test_a_damaged_payload_never_raises_anything_but_a_schema_error(at, noise):
    payload = bytearray(encode(make_group()))
    at %= len(payload)
    payload[at : at + len(noise)] = noise
    with contextlib.suppress(SchemaError):
        decode(bytes(payload))


def test_numpy_values_are_taken_as_plain_ones():
    rollout = make_rollout(0, reward=np.float32(0.5), token_ids=np.arange(5, dtype=np.int64))
    read = decode(encode(make_group(rollouts=[rollout]))).rollouts[0]
    assert (read.reward, read.token_ids) == (0.5, [0, 1, 2, 3, 4])


def test_the_payload_of_an_ordinary_rollout_names_no_fork():
    rollout = make_rollout(0, turn_rewards=[TurnReward(4, 0.5)], baseline_reward=0.0)
    batch = read_batch(encode(make_group(rollouts=[rollout, make_rollout(1)])))
    assert batch["metadata"].to_pylist() == [
        '{"turn_rewards": [[4, 0.5]], "baseline_reward": 0.0}',
        "{}",
    ]


def test_the_paths_of_a_rollout_are_its_segments_after_what_they_share():
    rollout = make_rollout(0, [0] * 7, segments=(Segment(5, 0, 3), Segment(8, 1, 5)))
    assert [path.tolist() for path in paths(rollout)] == [
        [0, 1, 2, 3, 4],
        [0, 1, 2, 5, 6, 7],
        [0, 1, 2, 5, 6, 8, 9],
    ]


def test_parquet_has_a_row_per_rollout_with_its_state(tmp_path):
    first, second = encode(make_group(2)), encode(make_group(1, group_id="g00000002"))
    file = tmp_path / "rollouts.parquet"
    assert write_parquet([(first, "trained", 4), (second, "ready", None)], file) == 3
    table = pq.read_table(file)
    assert table.column_names == [*SCHEMA.names, "state", "trained_version"]
    assert table["group_id"].to_pylist() == ["g00000001", "g00000001", "g00000002"]
    assert table["state"].to_pylist() == ["trained", "trained", "ready"]
    assert table["trained_version"].to_pylist() == [4, 4, None]
    assert table["token_ids"].to_pylist()[2] == [0, 1, 2, 3, 4]

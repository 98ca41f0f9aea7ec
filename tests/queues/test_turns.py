"""Turns on the wire: what goes in comes out, and what is wrong is refused by its field's name."""

import contextlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from queues.errors import SchemaError
from queues.records import FinishReason, Turn
from queues.turns import decode_turn, encode_turn

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=6)
GOOD = Turn(
    number=2,
    parent=1,
    shared=7,
    injected=[5, 6],
    token_ids=[8, 9],
    behavior_logprobs=[-0.5, -1.0],
    versions=[3, 4],
    finish_reason=FinishReason.STOP,
    cache_salt="3",
)


@st.composite
def turns(draw):
    number, token_ids = draw(st.integers(0, 9)), draw(IDS)
    parent = draw(st.integers(-1, number - 1))
    size = {"min_size": len(token_ids), "max_size": len(token_ids)}
    return Turn(
        number=number,
        parent=parent,
        shared=draw(st.integers(0, 2**31 - 1)) if parent >= 0 else 0,
        injected=draw(IDS),
        token_ids=token_ids,
        behavior_logprobs=draw(st.lists(st.floats(-50, 0, width=32), **size)),
        versions=draw(st.lists(st.integers(0, 2**31 - 1), **size)),
        finish_reason=draw(st.sampled_from(FinishReason)),
        cache_salt=draw(st.text()),
    )


@given(turns())
def test_a_turn_survives_the_wire_unchanged(turn):
    assert decode_turn(encode_turn(turn)) == turn
    assert decode_turn(memoryview(encode_turn(turn))) == turn


def test_arrays_are_taken_as_lists():
    as_arrays = {name: np.array(getattr(GOOD, name)) for name in ("injected", "versions")}
    assert decode_turn(encode_turn(replace(GOOD, **as_arrays))) == GOOD


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"number": -1}, "number: -1, must not be negative"),
        ({"number": "2"}, "number: not int32"),
        ({"parent": 2}, "parent: 2, must be an earlier turn, or -1"),
        ({"parent": -2}, "parent: -2, must be"),
        ({"parent": -1}, "shared: 7, must be 0 without a parent"),
        ({"shared": -1}, "shared: -1, must not be negative"),
        ({"injected": [-5]}, r"injected: \[-5\], must not be negative"),
        ({"injected": [None]}, "injected: must not be null"),
        ({"injected": [2**31]}, "injected: not list"),
        ({"token_ids": [8, -9]}, "token_ids: .*, must not be negative"),
        ({"token_ids": [8]}, "versions: .*, must be as many as token_ids"),
        ({"versions": [3, -1]}, "versions: .*, must not be negative"),
        ({"behavior_logprobs": [-1.0]}, "behavior_logprobs: .*, must be as many as token_ids"),
        ({"behavior_logprobs": [0.0, float("nan")]}, "behavior_logprobs: .*, must be finite"),
        ({"finish_reason": "bored"}, "finish_reason: bored, must be of"),
        ({"cache_salt": None}, "cache_salt: must not be null"),
    ],
)
def test_a_turn_out_of_range_is_refused(changes, message):
    with pytest.raises(SchemaError, match=f"^{message}"):
        encode_turn(replace(GOOD, **changes))


@given(st.integers(0, 10_000), st.binary(min_size=1, max_size=8))
def test_a_damaged_payload_never_raises_anything_but_a_schema_error(at, noise):
    payload = bytearray(encode_turn(GOOD))
    at %= len(payload)
    payload[at : at + len(noise)] = noise
    with contextlib.suppress(SchemaError):
        decode_turn(bytes(payload))
    for cut in (0, 8, len(payload) // 2):
        with pytest.raises(SchemaError, match=r"^payload: "):
            decode_turn(bytes(payload[:cut]))

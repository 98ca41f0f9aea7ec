"""Results that arrive together are validated together, and each is answered as if it came alone."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from queues import schema
from queues.broker.result_intake import PayloadBatching
from queues.errors import ProtocolError, SchemaError
from queues.records import PutStatus
from queues.schema import SMALL_BYTES, encode, summarize, summarize_many
from tests.queues.conftest import (
    answer,
    begin_work,
    make_group,
    make_rollout,
    over_ray,
)

GOOD = [
    encode(make_group(group_id=f"g{n}", rollouts=[make_rollout(i, [n, n + 1][:k]) for i in (0, 1)]))
    for n, k in ((1, 2), (2, 1), (3, 0))
]
LARGE = encode(make_group(rollouts=[make_rollout(0, [4] * 12_000)]))
BAD = [b"", b"garbage", GOOD[0][:-40], GOOD[1].replace(b"single_turn", b"single_tur\xff")]
MESSAGES = st.lists(
    st.tuples(st.lists(st.sampled_from([*GOOD, *GOOD, *BAD, LARGE]), max_size=4), st.booleans()),
    max_size=5,
)


def alone(payload):
    try:
        return summarize(payload)
    except SchemaError as error:
        return str(error)


@given(MESSAGES, st.sampled_from([1, 2**20]))
def test_every_message_that_waits_gets_what_its_own_payloads_would_get_alone(messages, batch_bytes):
    async def main():
        inside = PayloadBatching(batch_bytes)
        asked = [asyncio.create_task(inside.summarize(payloads)) for payloads, _ in messages]
        await asyncio.sleep(0)  # all have asked, none is answered
        for task, (_, gives_up) in zip(asked, messages, strict=True):
            if gives_up:
                task.cancel()
        return await asyncio.gather(*asked, return_exceptions=True)

    assert max(map(len, GOOD)) <= SMALL_BYTES < len(LARGE), "both sizes are covered"
    for outcome, (payloads, gives_up) in zip(asyncio.run(main()), messages, strict=True):
        if gives_up:
            assert isinstance(outcome, asyncio.CancelledError)
        else:
            results = [str(x) if isinstance(x, SchemaError) else x for x in outcome]
            assert results == [alone(payload) for payload in payloads]


def record_batches(monkeypatch):
    """Record the payloads of every joint validation from now on."""
    batches: list[list[bytes]] = []

    def summarize_recorded(payloads):
        batches.append(list(payloads))
        return summarize_many(payloads)

    monkeypatch.setattr(schema, "summarize_many", summarize_recorded)
    return batches


@pytest.mark.parametrize(
    ("batch_bytes", "expected"),
    [(2**20, [GOOD]), (1, [GOOD[:1], GOOD[1:2], GOOD[2:]])],
)
async def test_messages_that_arrive_together_are_validated_together_up_to_a_size(
    monkeypatch, batch_bytes, expected
):
    batches = record_batches(monkeypatch)
    inside = PayloadBatching(batch_bytes)
    await asyncio.gather(*(inside.summarize([payload]) for payload in GOOD))
    assert batches == expected


async def test_a_large_payload_is_validated_alone(monkeypatch):
    batches = record_batches(monkeypatch)
    inside = PayloadBatching()
    await asyncio.gather(*(inside.summarize([payload]) for payload in (GOOD[0], LARGE)))
    assert sorted(map(len, batches)) == [1, 1]


async def test_an_error_is_raised_in_every_caller(monkeypatch):
    def fail(payloads):
        raise MemoryError("no room")

    monkeypatch.setattr(schema, "summarize_many", fail)
    inside = PayloadBatching()
    asked = [inside.summarize([payload]) for payload in GOOD]
    outcomes = await asyncio.gather(*asked, return_exceptions=True)
    assert [str(outcome) for outcome in outcomes] == ["no room"] * len(GOOD)


@over_ray
async def test_every_put_of_a_message_has_its_own_answer(connect):
    broker = connect(groups_per_batch=2)
    first, second, third = await begin_work(broker, 3, capacity=8)
    payload = answer(first)
    puts = [
        ("a", payload),
        ("a", payload),
        ("b", answer(second)),
        ("a", b"garbage"),
        ("a", answer(replace(third, group_size=3))),
        ("a", answer(replace(third, group_id="g99999999"))),
        ("a", answer(second)),
    ]  # the client sends them in one message
    answers = await asyncio.gather(
        *(broker.put(*arguments) for arguments in puts), return_exceptions=True
    )
    assert answers[:3] == [PutStatus.ACCEPTED, PutStatus.DUPLICATE, PutStatus.FENCED]
    assert [type(error) for error in answers[3:6]] == [SchemaError, SchemaError, ProtocolError]
    assert answers[6] is PutStatus.ACCEPTED
    accounting = await broker.accounting()
    assert (accounting.ready, accounting.leased, accounting.duplicates) == (2, 1, 2)
    assert (await broker.status()).refused == {"duplicate": 1, "fenced": 1}
    assert (await broker.take(0, 10.0)).payloads == [payload, answer(second)]
    await broker.close()

"""Payloads of different messages are validated together, and each message gets its own results."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from queues import schema
from queues.broker.result_intake import PayloadBatching
from queues.errors import SchemaError
from queues.schema import summarize_many
from tests.queues.broker.test_result_intake import BAD, GOOD, LARGE

MESSAGES = st.lists(
    st.tuples(st.lists(st.sampled_from([*GOOD, *GOOD, *BAD, LARGE]), max_size=4), st.booleans()),
    max_size=5,
)


def as_text(results: list[Any]) -> list[Any]:
    return [str(x) if isinstance(x, SchemaError) else x for x in results]


@given(MESSAGES, st.sampled_from([1, 2**20]))
def test_every_message_that_waits_gets_the_results_of_its_own_payloads(
    messages: list[tuple[list[bytes], bool]], batch_bytes: int
) -> None:
    async def main() -> list[Any]:
        inside = PayloadBatching(batch_bytes)
        asked = [asyncio.create_task(inside.summarize(payloads)) for payloads, _ in messages]
        await asyncio.sleep(0)  # all have asked, none is answered
        for task, (_, gives_up) in zip(asked, messages, strict=True):
            if gives_up:
                task.cancel()
        return await asyncio.gather(*asked, return_exceptions=True)

    outcomes = asyncio.run(main())
    for outcome, (payloads, gives_up) in zip(outcomes, messages, strict=True):
        if gives_up:
            assert isinstance(outcome, asyncio.CancelledError)
        else:
            assert as_text(outcome) == as_text(summarize_many(payloads))


def record_batches(monkeypatch: pytest.MonkeyPatch) -> list[list[bytes]]:
    """Record the payloads of every joint validation from now on."""
    batches: list[list[bytes]] = []

    def summarize_recorded(payloads: Any) -> Any:
        batches.append(list(payloads))
        return summarize_many(payloads)

    monkeypatch.setattr(schema, "summarize_many", summarize_recorded)
    return batches


@pytest.mark.parametrize(
    ("batch_bytes", "expected"),
    [(2**20, [GOOD]), (1, [GOOD[:1], GOOD[1:2], GOOD[2:]])],
)
async def test_messages_that_arrive_together_are_validated_together_up_to_a_size(
    monkeypatch: pytest.MonkeyPatch, batch_bytes: int, expected: list[list[bytes]]
) -> None:
    batches = record_batches(monkeypatch)
    inside = PayloadBatching(batch_bytes)
    await asyncio.gather(*(inside.summarize([payload]) for payload in GOOD))
    assert batches == expected


async def test_a_large_payload_is_validated_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = record_batches(monkeypatch)
    inside = PayloadBatching()
    await asyncio.gather(*(inside.summarize([payload]) for payload in (GOOD[0], LARGE)))
    assert sorted(map(len, batches)) == [1, 1]


async def test_an_error_is_raised_in_every_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(payloads: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(schema, "summarize_many", fail)
    inside = PayloadBatching()
    asked = [inside.summarize([payload]) for payload in GOOD]
    outcomes = await asyncio.gather(*asked, return_exceptions=True)
    assert [str(outcome) for outcome in outcomes] == ["no room"] * len(GOOD)

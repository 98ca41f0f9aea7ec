"""Many results in one message: each answered as if it came alone, all in one commit."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from queues.errors import ProtocolError, SchemaError
from queues.records import PutStatus
from queues.schema import SMALL_BYTES, encode, summarize, summarize_many
from queues.storage.journal import Journal
from tests.queues.conftest import (
    answer,
    make_broker,
    make_group,
    make_prompts,
    make_rollout,
    opened,
)

GOOD = [
    encode(make_group(group_id=f"g{n}", rollouts=[make_rollout(i, [n, n + 1][:k]) for i in (0, 1)]))
    for n, k in ((1, 2), (2, 1), (3, 0))
]
LARGE = encode(make_group(rollouts=[make_rollout(0, [4] * 12_000)]))
BAD = [b"", b"garbage", GOOD[0][:-40], GOOD[1].replace(b"single_turn", b"single_tur\xff")]


@given(st.lists(st.sampled_from([*GOOD, *GOOD, *BAD, LARGE]), max_size=6))
def test_payloads_are_summarised_together_as_they_are_alone(payloads: list[bytes]) -> None:
    def alone(payload: bytes) -> Any:
        try:
            return summarize(payload)
        except SchemaError as error:
            return str(error)

    together = [
        str(result) if isinstance(result, SchemaError) else result
        for result in summarize_many(payloads)
    ]
    assert together == [alone(payload) for payload in payloads]


def test_both_sizes_of_payloads_are_covered() -> None:
    assert max(map(len, GOOD)) <= SMALL_BYTES < len(LARGE)


async def test_every_put_of_a_message_has_its_own_answer(connect: Any) -> None:
    broker = connect(groups_per_batch=2)
    await broker.issue(make_prompts(3), cursor="3")
    await broker.serving("a", 0)
    first, second, third = await broker.lease("a", 8, 10.0)
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
    assert [type(each) for each in answers[3:6]] == [SchemaError, SchemaError, ProtocolError]
    assert answers[6] is PutStatus.ACCEPTED
    accounting = await broker.accounting()
    assert (accounting.ready, accounting.leased, accounting.duplicates) == (2, 1, 2)
    assert (await broker.status()).refused == {"duplicate": 1, "fenced": 1}
    assert (await broker.take(0, 10.0)).payloads == [payload, answer(second)]
    await broker.close()


async def test_the_puts_of_a_message_share_one_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    syncs: list[int] = []

    async with opened(make_broker(tmp_path, groups_per_batch=8)) as broker:
        await broker.issue(make_prompts(8), cursor="8")
        await broker.serving("a", 0)
        leases = await broker.lease("a", 16, 10.0)
        monkeypatch.setattr(Journal, "commit", lambda self: syncs.append(1))
        await broker.intake.put_many([("a", answer(lease)) for lease in leases])
        assert syncs == [1]
        monkeypatch.undo()


@pytest.mark.ray
async def test_puts_of_a_process_travel_together_and_each_caller_gets_its_answer(
    ray_cluster: None,
) -> None:
    import ray

    from queues.ray_broker import BrokerClient

    @ray.remote
    class Counting:
        """Refuses every third put of all, and says how many came in each message."""

        def __init__(self) -> None:
            self.messages: list[int] = []

        async def put_many(self, puts: list[tuple[str, Any]]) -> list[Any]:
            first = sum(self.messages)
            self.messages.append(len(puts))
            await asyncio.sleep(0.05)
            return [
                SchemaError(bytes(payload).decode()) if (first + n) % 3 == 2 else PutStatus.ACCEPTED
                for n, (_, payload) in enumerate(puts)
            ]

        async def seen(self) -> list[int]:
            return self.messages

    actor = Counting.remote()
    client = BrokerClient(actor)
    calls = [asyncio.create_task(client.put("a", str(n).encode())) for n in range(9)]
    await asyncio.sleep(0.01)
    calls += [asyncio.create_task(client.put("a", str(n).encode())) for n in range(9, 12)]
    calls[1].cancel()
    answers = await asyncio.gather(*calls, return_exceptions=True)
    for number, got in enumerate(answers):
        if number == 1:
            assert isinstance(got, asyncio.CancelledError)
        elif number % 3 == 2:
            assert isinstance(got, SchemaError)
            assert str(got) == str(number)
        else:
            assert got is PutStatus.ACCEPTED
    assert await actor.seen.remote() == [9, 3]

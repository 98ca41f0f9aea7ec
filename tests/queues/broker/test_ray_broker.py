"""What only the broker in a Ray actor has to do; its contract is in test_broker."""

import asyncio
import os
import signal
from dataclasses import replace

import pytest
import ray
from ray.exceptions import RayActorError

from headway.errors import InputError
from queues.config import QueuesConfig, RunSpec
from queues.errors import BrokerLostError, LedgerError
from queues.ray_broker import create_broker
from queues.records import PutStatus
from queues.storage.ledger_schema import FILE_NAME
from tests.queues.conftest import CONFIG, SIZES, answer, begin_work, make_prompts

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]
SPEC = RunSpec(**SIZES)


def make_client(directory, *, session=None, **changes):
    return create_broker(
        directory, config=QueuesConfig(**(CONFIG | changes)), spec=SPEC, session=session
    )


def test_what_the_constructor_refuses_is_raised_as_it_is(tmp_path):
    with pytest.raises(InputError, match="steps = 0 must be at least 1"):
        create_broker(tmp_path, config=QueuesConfig(), spec=replace(SPEC, steps=0))


async def test_a_killed_broker_is_made_again_and_pending_calls_are_answered(tmp_path):
    async with asyncio.timeout(120):
        client = make_client(tmp_path, session="{}")
        *leases, other = await begin_work(client, 4, capacity=6)
        turn = "a", other.group_id, 1, 0, "turn/0"
        await client.note(*turn, b"first", 0)
        dies = asyncio.ensure_future(client.live())
        batch = asyncio.create_task(client.take(0, 60.0))
        await client.ping()
        os.kill(await client.handle.__ray_call__.remote(lambda _: os.getpid()), signal.SIGKILL)
        with pytest.raises(RayActorError):
            await dies
        puts = [client.put("a", answer(lease)) for lease in leases]
        assert await client.note(*turn, b"second", 0) == b"first"
        assert await asyncio.gather(*puts) == [PutStatus.ACCEPTED] * 2
        await client.start(again=True)
        assert len((await batch).payloads) == 2
        accounts = await client.accounting()
        assert (accounts.issued, accounts.taken, accounts.duplicates) == (4, 2, 0)
        await client.close()


async def test_a_broker_that_cannot_be_made_again_is_named(tmp_path):
    async with asyncio.timeout(120):
        client = make_client(tmp_path)
        pid = await client.handle.__ray_call__.remote(lambda _: os.getpid())
        os.kill(pid, signal.SIGSTOP)
        (tmp_path / FILE_NAME).write_bytes(b"no ledger" * 1000)
        os.kill(pid, signal.SIGKILL)
        for call in (client.start(again=True), client.cursor(), client.lease("a", 2, 1.0)):
            with pytest.raises(LedgerError, match="not a ledger"):
                await call


def test_a_broker_that_does_not_start_is_lost(tmp_path):
    with pytest.raises(BrokerLostError, match="did not start within 0 s"):
        create_broker(tmp_path, config=QueuesConfig(**CONFIG), spec=SPEC, start_seconds=0.0)


async def test_a_client_can_be_sent_to_other_actors(tmp_path):
    @ray.remote
    class Feeder:
        async def feed(self, broker):
            await broker.issue(make_prompts(1), cursor="sent")
            return await broker.cursor()

    client = make_client(tmp_path)
    assert ray.get(Feeder.remote().feed.remote(client)) == "sent"
    assert (await client.cursor()) == "sent"
    await client.close()

"""The broker's client and the shell of its process, without Ray: calls to an object of ours."""

import asyncio
import threading
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import (
    ActorPlacementGroupRemoved,
    ActorUnavailableError,
    ActorUnschedulableError,
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    RuntimeEnvSetupError,
)

from headway.ray_service import translated
from queues import ray_broker
from queues.broker.broker import Broker
from queues.config import QueuesConfig, RunSpec
from queues.errors import BrokerLostError, LedgerError, SchemaError
from queues.ray_broker import BrokerActor, BrokerClient
from queues.records import PutStatus
from queues.storage.ledger import Ledger
from tests.queues.conftest import CONFIG, SIZES, WAIT, InProcess


async def test_a_heartbeat_that_is_repeated_has_what_is_held_by_then():
    held = [("first", 1)]
    seen = []

    class Service:
        async def heartbeat(self, engine_id, leases):
            seen.append(leases)
            if len(seen) == 1:
                held.append(("second", 1))
                raise ActorUnavailableError("it is made again", None)
            return []

    assert (await BrokerClient(InProcess(Service())).heartbeat("a", held)) == []
    assert seen == [[("first", 1)], [("first", 1), ("second", 1)]]


@pytest.mark.parametrize(("answer_seconds", "seconds"), [(0.1, 0.5), (1.0, 1.5)])
async def test_calls_wait_while_the_constructor_of_the_next_process_takes_its_time(
    monkeypatch, answer_seconds, seconds
):
    """A call that begins only after it has a whole deadline, however late it begins."""
    monkeypatch.setattr(ray_broker, "LATE_SECONDS", 0.02)
    constructed = asyncio.Event()

    class Service:
        async def paused(self):
            await constructed.wait()

        async def cursor(self):
            await constructed.wait()
            await asyncio.sleep(answer_seconds / 2)
            return "here"

    asyncio.get_running_loop().call_later(seconds, constructed.set)
    assert await BrokerClient(InProcess(Service()), answer_seconds).cursor() == "here"


@pytest.mark.parametrize("full", ["run", "backup"])
async def test_the_time_to_start_again_is_counted_from_when_the_disks_have_space(
    tmp_path, monkeypatch, full
):

    monkeypatch.setattr(ray_broker, "START_SECONDS", 1.0)
    monkeypatch.setattr(ray_broker, "SPACE_SECONDS", 0.05)
    full_probes = 30  # of 0.05 s or more each
    probes = 0

    def has_space(folder):
        nonlocal probes
        if folder.name != full:
            return True
        probes += 1
        return probes > full_probes

    monkeypatch.setattr(ray_broker, "has_space", has_space)

    class Hanging:
        async def opened(self):
            await asyncio.Event().wait()

    folders = {"directory": tmp_path / "run", "backup": tmp_path / "backup"}
    client = BrokerClient(InProcess(Hanging()), **folders)
    with pytest.raises(TimeoutError):  # the disk has space in the end, and it still hangs
        await client.start(again=True)
    assert probes > full_probes
    monkeypatch.setattr(ray_broker, "has_space", lambda _: False)
    with pytest.raises(TimeoutError):  # a first start finds a full disk by itself
        await client.start()


def test_the_error_of_a_bug_in_the_broker_is_raised_as_it_is():
    bug = RayTaskError("take", "", ZeroDivisionError("a bug"))
    assert translated(bug, "the broker's process", BrokerLostError) is bug


DEATHS = [
    OutOfMemoryError("no memory"), NodeDiedError("no node"), RuntimeEnvSetupError("no environment"),
    ActorUnschedulableError("no place"), ActorPlacementGroupRemoved(), RayActorError(),
]  # fmt: skip


@pytest.mark.parametrize("death", DEATHS, ids=lambda death: type(death).__name__)
async def test_every_way_to_lose_a_process_is_a_lost_broker(death):
    async def fail(*_):
        raise death

    methods = dict.fromkeys(("cursor", "opened", "live", "ping"), fail)
    client = BrokerClient(InProcess(SimpleNamespace(**methods)))
    for call in (client.cursor(), client.start(again=True)):
        with pytest.raises(BrokerLostError, match="the broker's process is gone"):
            await call
    for call in (client.live(), client.ping()):
        with pytest.raises(RayError):  # what a supervisor restarts
            await call


async def test_a_broker_that_does_not_answer_is_lost():
    class Mute:
        """Never answers, nor why, but tells its cursor at once."""

        async def take(self, *_):
            await asyncio.Event().wait()

        paused = ack = take

        async def cursor(self):
            return "here"

    client = BrokerClient(InProcess(Mute()), answer_seconds=0.01)
    with pytest.raises(BrokerLostError, match=r"take: the broker did not answer within 0\.2 s"):
        await client.take(0, 1.0)
    with pytest.raises(BrokerLostError, match=r"ack: the broker did not answer within 0\.2 s"):
        await client.ack(0, {})
    assert await client.cursor() == "here"


async def test_a_call_that_was_lost_is_sent_again():
    calls = []

    class Forgetful:
        """Never answers the first call."""

        async def paused(self):
            pass

        async def cursor(self):
            calls.append(None)
            if len(calls) == 1:
                await asyncio.Event().wait()
            return f"call {len(calls)}"

    assert await BrokerClient(InProcess(Forgetful()), answer_seconds=0.1).cursor() == "call 2"


async def test_a_broker_that_is_made_again_waits_longer_for_the_lock_of_the_one_before(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("queues.ray_broker.keep_logs_small", lambda: None)
    monkeypatch.setattr(Broker, "predecessor_seconds", 0.0)
    process = SimpleNamespace(was_current_actor_reconstructed=False)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: process)

    options = {"config": QueuesConfig(**CONFIG), "spec": RunSpec(**SIZES), "owner": "one"}

    async def make():
        return BrokerActor(tmp_path, **options)

    dying = Ledger(tmp_path, synchronous="normal")
    with pytest.raises(LedgerError, match="another broker of this run is alive"):
        await (await make()).opened()
    process.was_current_actor_reconstructed = True
    gone = threading.Timer(0.3, dying.close)  # beside the constructor, which blocks
    gone.start()
    broker = await make()
    gone.join()
    await broker.opened()
    await broker.close()


async def test_puts_made_while_an_answer_is_pending_share_a_message_and_each_gets_its_own_answer():
    """Every third put is refused."""
    messages, arrived, answered = [], asyncio.Event(), asyncio.Event()

    class Service:
        async def put_many(self, puts):
            messages.append(puts)
            arrived.set()
            await answered.wait()
            numbers = [int(bytes(payload)) for _, payload in puts]
            return [SchemaError(f"{n}") if n % 3 == 2 else PutStatus.ACCEPTED for n in numbers]

    client = BrokerClient(InProcess(Service()))
    calls = [asyncio.create_task(client.put("a", str(n).encode())) for n in range(9)]
    await asyncio.wait_for(arrived.wait(), WAIT)
    calls += [asyncio.create_task(client.put("a", str(n).encode())) for n in range(9, 12)]
    calls[1].cancel()
    await asyncio.sleep(0)
    answered.set()
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert [len(puts) for puts in messages] == [9, 3]
    assert isinstance(answers.pop(1), asyncio.CancelledError)
    refused = [str(x) for x in answers if isinstance(x, SchemaError)]
    assert refused == ["2", "5", "8", "11"]
    assert answers.count(PutStatus.ACCEPTED) == 7


@pytest.mark.parametrize("reason", ["no space is left", None])
async def test_a_late_put_is_waited_for_while_the_broker_says_why(reason):
    asked, often = [], asyncio.Event()

    class Service:
        async def put_many(self, puts):
            await often.wait()
            return [PutStatus.ACCEPTED] * len(puts)

        async def paused(self):
            asked.append(reason)
            if len(asked) == 30:  # a call without an answer is sent 20 times
                often.set()
            return reason

    client = BrokerClient(InProcess(Service()), answer_seconds=0.01)
    if reason is not None:
        assert await client.put("a", b"") is PutStatus.ACCEPTED
        return
    with pytest.raises(BrokerLostError, match=r"put_many: the broker did not answer within 0\.2 s"):
        await client.put("a", b"")

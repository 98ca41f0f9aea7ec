"""What only the broker in a Ray actor has to do; its contract is in test_broker."""

import asyncio
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
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

from headway.errors import InputError
from headway.ray_service import translated
from queues.broker.broker import Broker
from queues.config import QueuesConfig, RunSpec
from queues.errors import BrokerLostError, LedgerError
from queues.records import PutStatus
from queues.storage.ledger import Ledger
from queues.storage.ledger_schema import FILE_NAME
from tests.queues.conftest import CONFIG, SIZES, answer, make_prompts

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]
SPEC = RunSpec(**SIZES)


def test_what_the_constructor_refuses_is_raised_as_it_is(tmp_path: Path) -> None:
    from queues.ray_broker import create_broker

    with pytest.raises(InputError, match="steps = 0 must be at least 1"):
        create_broker(tmp_path, config=QueuesConfig(), spec=replace(SPEC, steps=0))


async def test_a_dead_broker_is_named_and_its_run_goes_on_in_a_new_one(tmp_path: Path) -> None:
    import ray

    from queues.ray_broker import create_broker

    client = create_broker(tmp_path, config=QueuesConfig(**CONFIG), spec=SPEC)
    await client.issue(make_prompts(2), cursor="2")
    await client.serving("a", 0)
    lease, lost = await client.lease("a", 4, 10.0)
    assert await client.put("a", answer(lease)) is PutStatus.ACCEPTED
    ray.kill(client.handle)  # which does not wait for the end of the process

    async def ask_until_it_is_gone() -> None:
        while True:
            await client.status()

    with pytest.raises(BrokerLostError, match="process is gone"):
        await asyncio.wait_for(ask_until_it_is_gone(), 30)

    again = create_broker(tmp_path, config=QueuesConfig(**CONFIG), spec=SPEC)
    await again.serving("b", 0)
    (redelivered,) = await again.lease("b", 4, 10.0)
    assert (redelivered.group_id, redelivered.attempt) == (lost.group_id, 2)
    assert await again.put("b", answer(redelivered)) is PutStatus.ACCEPTED
    assert len((await again.take(0, 10.0)).payloads) == 2
    await again.close()


async def test_a_killed_broker_is_made_again_and_pending_calls_are_answered(tmp_path: Path) -> None:
    from queues.ray_broker import create_broker

    async with asyncio.timeout(120):
        config = QueuesConfig(**CONFIG)
        client = create_broker(tmp_path, config=config, spec=SPEC, session="{}")
        await client.issue(make_prompts(4), cursor="4")
        await client.serving("a", 0)
        leases = await client.lease("a", 4, 10.0)
        dies = asyncio.ensure_future(client.live())
        batch = asyncio.create_task(client.take(0, 60.0))
        await client.ping()
        os.kill(await client.handle.__ray_call__.remote(lambda _: os.getpid()), signal.SIGKILL)
        with pytest.raises(RayActorError):
            await dies
        puts = [client.put("a", answer(lease)) for lease in leases]
        assert await asyncio.gather(*puts) == [PutStatus.ACCEPTED] * 2
        await client.start(again=True)
        assert len((await batch).payloads) == 2
        accounts = await client.accounting()
        assert (accounts.issued, accounts.taken, accounts.duplicates) == (4, 2, 0)
        await client.close()


async def test_a_broker_that_cannot_be_made_again_is_named(tmp_path: Path) -> None:
    from queues.ray_broker import create_broker

    async with asyncio.timeout(120):
        client = create_broker(tmp_path, config=QueuesConfig(**CONFIG), spec=SPEC)
        pid = await client.handle.__ray_call__.remote(lambda _: os.getpid())
        os.kill(pid, signal.SIGSTOP)
        (tmp_path / FILE_NAME).write_bytes(b"no ledger" * 1000)
        os.kill(pid, signal.SIGKILL)
        for call in (client.start(again=True), client.cursor(), client.lease("a", 2, 1.0)):
            with pytest.raises(LedgerError, match="not a ledger"):
                await call


async def test_a_heartbeat_that_is_repeated_has_what_is_held_by_then() -> None:
    from queues.ray_broker import BrokerClient

    held = [("first", 1)]
    seen = []

    class Handle:
        @property
        def heartbeat(self) -> "Handle":
            return self

        async def remote(self, engine_id: str, leases: list[tuple[str, int]]) -> list[Any]:
            seen.append(leases)
            if len(seen) == 1:
                held.append(("second", 1))
                raise ActorUnavailableError("it is made again", None)
            return []

    assert (await BrokerClient(Handle()).heartbeat("a", held)) == []
    assert seen == [[("first", 1)], [("first", 1), ("second", 1)]]


@pytest.mark.parametrize(("answer_seconds", "seconds"), [(0.1, 0.5), (1.0, 1.5)])
async def test_calls_wait_while_the_constructor_of_the_next_process_takes_its_time(
    monkeypatch: pytest.MonkeyPatch, answer_seconds: float, seconds: float
) -> None:
    """A call that begins only after it has a whole deadline, however late it begins."""
    from queues import ray_broker
    from queues.ray_broker import BrokerClient

    monkeypatch.setattr(ray_broker, "LATE_SECONDS", 0.02)
    constructed = asyncio.Event()

    class Handle:
        def __getattr__(self, name: str) -> Any:
            return SimpleNamespace(remote=getattr(self, f"_{name}"))

        async def _paused(self) -> None:
            await constructed.wait()

        async def _cursor(self) -> str:
            await constructed.wait()
            await asyncio.sleep(0.05)
            return "here"

    asyncio.get_running_loop().call_later(seconds, constructed.set)
    assert await BrokerClient(Handle(), answer_seconds).cursor() == "here"


@pytest.mark.parametrize("full", ["run", "backup"])
async def test_the_time_to_start_again_is_counted_from_when_the_disks_have_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    from queues import ray_broker

    monkeypatch.setattr(ray_broker, "START_SECONDS", 1.0)
    monkeypatch.setattr(ray_broker, "SPACE_SECONDS", 0.05)
    full_probes = 30  # of 0.05 s or more each
    probes = 0

    def has_space(folder: Path) -> bool:
        nonlocal probes
        if folder.name != full:
            return True
        probes += 1
        return probes > full_probes

    monkeypatch.setattr(ray_broker, "has_space", has_space)

    hanging = SimpleNamespace(opened=SimpleNamespace(remote=asyncio.Event().wait))
    folders = {"directory": tmp_path / "run", "backup": tmp_path / "backup"}
    client = ray_broker.BrokerClient(hanging, **folders)
    with pytest.raises(TimeoutError):  # the disk has space in the end, and it still hangs
        await client.start(again=True)
    assert probes > full_probes
    monkeypatch.setattr(ray_broker, "has_space", lambda _: False)
    with pytest.raises(TimeoutError):  # a first start finds a full disk by itself
        await client.start()


async def test_a_broker_that_is_made_again_waits_longer_for_the_lock_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    from queues.ray_broker import BrokerActor

    monkeypatch.setattr("queues.ray_broker.keep_logs_small", lambda: None)
    monkeypatch.setattr(Broker, "predecessor_seconds", 0.0)
    process = SimpleNamespace(was_current_actor_reconstructed=False)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: process)

    async def make() -> BrokerActor:
        return BrokerActor(tmp_path, config=QueuesConfig(**CONFIG), spec=SPEC, owner="one")

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


def test_the_error_of_a_bug_in_the_broker_is_raised_as_it_is() -> None:
    bug = RayTaskError("take", "", ZeroDivisionError("a bug"))
    assert translated(bug, "the broker's process", BrokerLostError) is bug


DEATHS = [
    OutOfMemoryError("no memory"), NodeDiedError("no node"), RuntimeEnvSetupError("no environment"),
    ActorUnschedulableError("no place"), ActorPlacementGroupRemoved(), RayActorError(),
]  # fmt: skip


@pytest.mark.parametrize("death", DEATHS, ids=lambda death: type(death).__name__)
async def test_every_way_to_lose_a_process_is_a_lost_broker(death: RayError) -> None:
    from queues.ray_broker import BrokerClient

    class Handle:
        def __getattr__(self, name: str) -> Any:
            return SimpleNamespace(remote=self._fail)

        async def _fail(self, *_: Any) -> None:
            raise death

    client = BrokerClient(Handle())
    for call in (client.cursor(), client.start(again=True)):
        with pytest.raises(BrokerLostError, match="the broker's process is gone"):
            await call
    for call in (client.live(), client.ping()):
        with pytest.raises(RayError):  # what a supervisor restarts
            await call


async def test_a_broker_that_does_not_answer_is_lost() -> None:
    import ray

    from queues.ray_broker import BrokerClient

    @ray.remote
    class Mute:
        """Answers late, and never why, but its cursor at once."""

        async def paused(self) -> None:
            await asyncio.Event().wait()

        async def take(self, version: int, timeout: float) -> None:
            await asyncio.sleep(timeout + 3.0)

        async def ack(self, version: int, statistics: dict[str, float]) -> None:
            await asyncio.sleep(3.0)

        async def cursor(self) -> str:
            return "here"

    handle = Mute.options(max_concurrency=9, num_cpus=0).remote()
    assert await BrokerClient(handle).cursor() == "here"
    client = BrokerClient(handle, answer_seconds=0.1)
    with pytest.raises(BrokerLostError, match=r"take: the broker did not answer within 2 s"):
        await client.take(0, 1.0)
    with pytest.raises(BrokerLostError, match=r"ack: the broker did not answer within 2 s"):
        await client.ack(0, {})
    await asyncio.sleep(2.0)
    assert await client.cursor() == "here", "late answers disturb nobody"


async def test_a_call_that_was_lost_is_sent_again() -> None:
    import ray

    from queues.ray_broker import BrokerClient

    @ray.remote
    class Forgetful:
        """Never answers the first call, and counts the calls."""

        def __init__(self) -> None:
            self.calls = 0

        async def paused(self) -> None:
            pass

        async def cursor(self) -> str:
            self.calls += 1
            if self.calls == 1:
                await asyncio.Event().wait()
            return f"call {self.calls}"

    handle = Forgetful.options(max_concurrency=9, num_cpus=0).remote()
    await handle.paused.remote()  # its process has started
    assert await BrokerClient(handle, answer_seconds=1.0).cursor() == "call 2"


def test_a_broker_that_does_not_start_is_lost(tmp_path: Path) -> None:
    from queues.ray_broker import create_broker

    with pytest.raises(BrokerLostError, match="did not start within 0 s"):
        create_broker(tmp_path, config=QueuesConfig(**CONFIG), spec=SPEC, start_seconds=0.0)


async def test_a_lease_whose_answer_nobody_received_is_redelivered(tmp_path: Path) -> None:
    from queues.ray_broker import create_broker

    config = QueuesConfig(**(CONFIG | {"lease_seconds": 1.0, "heartbeat_seconds": 0.2}))
    client = create_broker(tmp_path, config=config, spec=SPEC)
    await client.serving("a", 0)
    asking = asyncio.create_task(client.lease("a", 2, 30.0))
    await asyncio.sleep(0.2)
    asking.cancel()
    await client.issue(make_prompts(1), cursor="1")
    while not (await client.status()).depth["leased"]:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    (again,) = await client.lease("a", 2, 10.0)
    assert again.attempt == 2
    assert await client.put("a", answer(again)) is PutStatus.ACCEPTED
    await client.close()


async def test_a_client_can_be_sent_to_other_actors(tmp_path: Path) -> None:
    import ray

    from queues.ray_broker import BrokerClient, create_broker

    @ray.remote
    class Feeder:
        async def feed(self, broker: BrokerClient) -> str | None:
            await broker.issue(make_prompts(1), cursor="sent")
            return await broker.cursor()

    client = create_broker(tmp_path, config=QueuesConfig(**CONFIG), spec=SPEC)
    assert ray.get(Feeder.remote().feed.remote(client)) == "sent"
    assert (await client.cursor()) == "sent"
    await client.close()

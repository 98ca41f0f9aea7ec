"""Direct updates from the publisher to a fake engine."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.waiting import reached, until
from tests.weight_sync.checksum import checksum
from tests.weight_sync.conftest import ReceiverLink
from tests.weight_sync.direct.fakes import TRANSFER, FakeEngine, FakeSender, update_of
from weight_sync.direct.attempt import Transfer, Weights
from weight_sync.direct.direct_receiver import DirectReceiver
from weight_sync.direct.publisher import DirectPublisher
from weight_sync.errors import (
    DeadlineExceeded,
    IncompatibleWeights,
    LoadFailed,
    PublishFailed,
    UpdateRefused,
)
from weight_sync.vllm.transfer import METHODS


def connect(link: ReceiverLink, weights: Weights, transfer: Transfer) -> FakeSender:
    return FakeSender(transfer)


TENSORS = [("a", torch.ones(3)), ("b", torch.zeros(2, 2))]


def receiver_of(engine: FakeEngine, tensors: Weights = TENSORS, **options: Any) -> DirectReceiver:
    async def join() -> None:
        engine.events.append("join")

    expected = {name: (None, tuple(tensor.shape)) for name, tensor in tensors}
    return DirectReceiver(engine, join, expected=expected, **options)


class Running:
    """A receiver that runs in a loop of another thread."""

    def __init__(self, engine: FakeEngine, tensors: Weights, loop: Any) -> None:
        self.versions: list[int] = []

        async def on_version(version: int) -> None:
            self.versions.append(version)

        self.stop = asyncio.Event()
        self.receiver = receiver_of(engine, tensors, on_version=on_version)
        self.link = ReceiverLink("e0", self.receiver, loop)
        self.ended = asyncio.run_coroutine_threadsafe(self.receiver.run(self.stop), loop)
        self._loop = loop

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self.stop.set)
        self.ended.result(30)


def test_publish_returns_after_a_copy_and_engines_get_that_copy(loop, weights) -> None:
    engine, reports = FakeEngine(), []
    running = Running(engine, weights(0).items(), loop)
    until(lambda: engine.events == ["join"])
    engine.events.clear()
    sent = threading.Event()

    def engines():
        assert sent.wait(30)
        return [running.link]

    with DirectPublisher(engines, connect, reports.append) as publisher:
        tensors = weights(0)
        digest = publisher.publish(0, tensors.items())
        for tensor in tensors.values():
            tensor.zero_()
        sent.set()
        publisher.flush(30)
        until(lambda: running.versions == [0])
        publisher.publish(1, weights(1).items())
        publisher.flush(30)
        until(lambda: running.versions == [0, 1])
    assert digest.result(30) == checksum(weights(0).items())
    assert checksum(engine.weights.items()) == checksum(weights(1).items())
    assert engine.events == [
        *["pause", "init_weight_transfer_engine", *TRANSFER, "serve 0", "resume"],
        *["pause", *TRANSFER, "serve 1", "resume"],
    ]
    assert [(r.version, r.error, r.seeding) for r in reports] == [(0, None, True), (1, None, False)]
    for r in reports:
        assert r.published_at <= r.staged_at == r.swap_started_at <= r.swap_finished_at
    running.end()


class RecordingLink:
    """An engine that accepts every call (an `EngineLink`)."""

    engine_id, workers = "e0", 1

    def pause(self, *_: Any) -> None:
        pass

    transfer = resume = give_up = pause


def recording(record: Callable[[Weights], None]) -> Callable[..., SimpleNamespace]:
    """Return a `Connect` whose connections record the weights that they send."""
    return lambda *_: SimpleNamespace(
        send=lambda weights, transfer: record(weights), close=lambda: None
    )


def test_an_engine_that_joins_during_a_publish_gets_the_copy_of_the_version_before(weights) -> None:
    links, digests = [], []
    connect = recording(lambda weights: digests.append(checksum(weights)))

    def slow_tensors() -> Iterator[tuple[str, torch.Tensor]]:
        first, *others = weights(1).items()
        yield first
        links.append(RecordingLink())
        until(lambda: digests)
        yield from others

    with DirectPublisher(lambda: links, connect, [].append, seed_seconds=0.01) as publisher:
        publisher.publish(0, weights(0).items())
        publisher.flush(30)
        publisher.publish(1, slow_tensors())
        publisher.flush(30)
    assert digests == [checksum(weights(v).items()) for v in (0, 1)]


def test_two_sets_of_host_memory_suffice_while_one_version_is_sent_and_one_waits(weights) -> None:
    asked, go_on, sent = threading.Semaphore(0), threading.Semaphore(1), []
    link = RecordingLink()

    def engines():
        asked.release()
        assert go_on.acquire(timeout=30)
        return [link]

    connect = recording(sent.append)
    with DirectPublisher(engines, connect, [].append, seed_seconds=1000.0) as publisher:
        publisher.publish(0, weights(0).items())
        publisher.flush(30)
        assert asked.acquire(timeout=30)
        publisher.publish(1, weights(1).items())
        assert asked.acquire(timeout=30)
        publisher.publish(2, weights(2).items())
        go_on.release(2)
        publisher.flush(30)
        assert checksum(sent[-1]) == checksum(weights(2).items())
    assert len(sent) == 3
    assert len({tensor.data_ptr() for tensors in sent for _, tensor in tensors}) == 2 * len(sent[0])


def test_engines_that_take_long_together_fail_no_publish(weights) -> None:
    release = threading.Event()

    def engines():
        assert release.wait(30)
        return []

    with DirectPublisher(engines, connect, [].append, timeout=1e-9) as publisher:
        publisher.publish(0, weights(0).items())
        publisher.publish(1, weights(1).items())
        release.set()
        publisher.flush(30)


def test_a_failure_between_versions_is_raised_by_a_later_call_and_the_next_version_is_sent(
    loop, weights
) -> None:
    engine, calls = FakeEngine(), []
    running = Running(engine, weights(0).items(), loop)

    def engines():
        calls.append(True)
        if len(calls) == 2:
            raise ConnectionError("no broadcaster")
        return [running.link]

    with DirectPublisher(engines, connect, [].append, seed_seconds=0.01) as publisher:
        publisher.publish(0, weights(0).items())
        with pytest.raises(PublishFailed, match="version 0 failed: no broadcaster"):
            until(lambda: publisher.flush(30))
        publisher.publish(2, weights(2).items())
        publisher.flush(30)
    assert checksum(engine.weights.items()) == checksum(weights(2).items())
    running.end()


def begin(engine: FakeEngine, **options: Any) -> tuple[DirectReceiver, Any, asyncio.Event]:
    """Return a receiver, the task that runs it, and the event that ends it."""
    receiver, stop = receiver_of(engine, **options), asyncio.Event()
    return receiver, asyncio.create_task(receiver.run(stop)), stop


async def bring(receiver: DirectReceiver, version: int, attempt: str) -> int | None:
    served = await receiver.pause(version, attempt)
    for method in TRANSFER:
        payload = update_of(TENSORS) if method == "update_weights" else None
        await receiver.transfer(attempt, method, payload)
    await receiver.resume(attempt)
    return served


async def test_calls_outside_their_attempt_are_refused_and_have_no_effect() -> None:
    engine = FakeEngine()
    receiver, running, stop = begin(engine)
    for late in (receiver.transfer("x", "start_weight_update", None), receiver.resume("x")):
        with pytest.raises(UpdateRefused, match="this attempt to send weights is over"):
            await late
    assert await bring(receiver, 3, "one") is None
    await reached(lambda: receiver.handled_version == 3)
    for version in (2, 3):
        with pytest.raises(
            UpdateRefused, match=f"version {version} was refused: the engine serves 3"
        ):
            await receiver.pause(version, "late")
    assert await bring(receiver, 4, "two") == 3
    with pytest.raises(UpdateRefused):
        await receiver.resume("one")
    assert engine.events[-2:] == ["serve 4", "resume"]
    stop.set()
    await running
    with pytest.raises(UpdateRefused, match="the engine is about to end"):
        await receiver.pause(5, "three")


async def test_what_happens_while_an_engine_stops_ends_the_attempt_before_its_next_step() -> None:
    engine = FakeEngine()
    receiver, running, _ = begin(engine)
    pauses, stands = asyncio.Event(), asyncio.Event()

    async def pause() -> None:
        pauses.set()
        await stands.wait()

    engine.pause = pause
    pausing = asyncio.create_task(receiver.pause(0, "one"))
    await pauses.wait()
    await receiver.give_up("it took too long")
    stands.set()
    with pytest.raises(UpdateRefused, match="this attempt"):
        await pausing
    with pytest.raises(LoadFailed, match="it took too long"):
        await running


async def test_a_pause_that_nobody_ends_ends_the_engine() -> None:
    receiver, running, _ = begin(FakeEngine(), timeout=0.01)
    await receiver.pause(2, "one")
    with pytest.raises(DeadlineExceeded, match=r"version 2 was not whole within 0.01 s"):
        await running


async def test_another_learner_finds_a_mixture_and_the_engine_ends() -> None:
    receiver, running, _ = begin(FakeEngine())
    await receiver.pause(2, "one")
    with pytest.raises(LoadFailed, match="version 2 came while version 2 was not whole"):
        await receiver.pause(2, "two")
    with pytest.raises(LoadFailed):
        await running


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([("a", torch.ones(4))], r"tensor 'a' of version 0 is \(4,\); the engine expects \(3,\)"),
        ([("c", torch.ones(1))], r"tensor 'c' of version 0 is \(1,\).* expects no such tensor"),
        ([("a", torch.ones(3))], r"version 0 lacks 1 tensors that the engine needs \(b\)"),
    ],
)
async def test_tensors_of_another_model_end_the_engine_before_it_goes_on(tensors, message) -> None:
    engine = FakeEngine()
    receiver, running, _ = begin(engine)
    await receiver.pause(0, "one")
    with suppress(IncompatibleWeights):
        await receiver.transfer("one", "update_weights", update_of(tensors))
    with pytest.raises((IncompatibleWeights, UpdateRefused)):
        await receiver.transfer("one", "finish_weight_update", None)
    with pytest.raises(IncompatibleWeights, match=message):
        await running
    assert "finish_weight_update" not in engine.events


async def test_the_learner_does_not_wait_for_who_uses_the_version_and_the_next_is_refused() -> None:
    evaluated, versions = asyncio.Event(), []

    async def on_version(version: int) -> None:
        versions.append(version)
        await evaluated.wait()

    receiver, running, stop = begin(FakeEngine(), on_version=on_version)
    await bring(receiver, 0, "one")
    await reached(lambda: versions == [0])
    with pytest.raises(UpdateRefused, match="version 1 was refused: version 0 is still in use"):
        await receiver.pause(1, "two")
    evaluated.set()
    await reached(lambda: receiver.handled_version == 0)
    await bring(receiver, 1, "three")
    await reached(lambda: versions == [0, 1])
    stop.set()
    await running


async def test_an_engine_registers_again_since_a_broadcaster_may_be_restarted(
    broadcaster, monkeypatch
) -> None:
    monkeypatch.setattr("weight_sync.direct.direct_receiver.JOIN_SECONDS", 0.01)
    joined, stop = asyncio.Semaphore(0), asyncio.Event()

    async def join() -> None:
        await broadcaster.join("e0", "a handle", 2)
        joined.release()

    running = asyncio.create_task(DirectReceiver(FakeEngine(), join, expected={}).run(stop))
    for _ in range(3):
        await asyncio.wait_for(joined.acquire(), 10)
        assert await broadcaster.engines() == {"e0": ("a handle", 2)}
        await broadcaster.release("e0")
        assert await broadcaster.engines() == {}
    stop.set()
    await running


@pytest.mark.vllm
async def test_vllms_endpoint_is_called_in_its_own_terms() -> None:
    from weight_sync.vllm.transfer import transfer

    calls = []

    class Endpoint:
        def __getattr__(self, name: str):
            async def method(*arguments: Any) -> None:
                calls.append((name, *arguments))

            return method

    payloads = [{"rank_offset": 1}, None, {"update_info": {"names": ["a"]}}, None]
    for method, payload in zip(METHODS, payloads, strict=True):
        await transfer(Endpoint(), method, payload)
    with pytest.raises(ValueError, match="method is 'explode'; expected one of"):
        await transfer(Endpoint(), "explode", None)
    assert [name for name, *_ in calls] == ["shutdown_weight_transfer_engine", *METHODS]
    assert calls[1][1].init_info == {"rank_offset": 1}
    assert calls[3][1].update_info == {"names": ["a"]}

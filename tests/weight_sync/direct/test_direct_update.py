"""Direct updates from the publisher to a fake engine."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.weight_sync.conftest import ReceiverLink, until
from weight_sync.broadcaster import Broadcaster
from weight_sync.checksum import checksum
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


class FakeEngine:
    """A `DirectEngine` that records its calls and weights."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.fails = 0

    async def pause(self) -> None:
        self.events.append("pause")

    async def transfer(self, method: str, payload: dict[str, Any] | None) -> None:
        self.events.append(method)
        if method not in METHODS:
            raise ValueError(method)
        if method == "update_weights":
            if self.fails:
                self.fails -= 1
                raise LoadFailed("injected")
            self.weights = {n: t.clone() for n, t in payload["update_info"]["tensors"]}

    async def serve(self, version: int) -> None:
        self.events.append(f"serve {version}")

    async def resume(self) -> None:
        self.events.append("resume")


def update_of(weights: Weights) -> dict[str, Any]:
    """Return the payload of one call: the names as vLLM sends them, and the tensors themselves."""
    return {
        "update_info": {
            "names": [name for name, _ in weights],
            "dtype_names": ["float32" for _ in weights],
            "shapes": [list(tensor.shape) for _, tensor in weights],
            "tensors": list(weights),
        }
    }


class FakeSender:
    """Speaks to the endpoint in the order of vLLM's trainer engines (a `Sender`)."""

    def __init__(self, transfer: Transfer) -> None:
        transfer("init_weight_transfer_engine", [{}])

    def send(self, weights: Weights, transfer: Transfer) -> None:
        transfer("start_weight_update", [None])
        transfer("update_weights", [update_of(weights)])
        transfer("finish_weight_update", [None])

    def close(self) -> None:
        pass


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


TRANSFER = ["start_weight_update", "update_weights", "finish_weight_update"]


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
    assert digest == checksum(weights(0).items())
    assert checksum(engine.weights.items()) == checksum(weights(1).items())
    assert engine.events == [
        *["pause", "init_weight_transfer_engine", *TRANSFER, "serve 0", "resume"],
        *["pause", *TRANSFER, "serve 1", "resume"],
    ]
    assert [(r.version, r.error, r.seeding) for r in reports] == [(0, None, True), (1, None, False)]
    for r in reports:
        assert r.published_at <= r.staged_at == r.swap_started_at <= r.swap_finished_at
    loop.call_soon_threadsafe(running.stop.set)
    running.ended.result(30)


def test_an_engine_that_failed_ends_and_the_one_made_again_gets_the_newest_version(
    loop, weights
) -> None:
    failing, again = FakeEngine(), FakeEngine()
    failing.fails = 1
    first = Running(failing, weights(4).items(), loop)
    links, reports = [first.link], []
    with DirectPublisher(lambda: links, connect, reports.append, seed_seconds=0.01) as publisher:
        publisher.publish(4, weights(4).items())
        with pytest.raises(LoadFailed, match="injected"):
            first.ended.result(30)
        second = Running(again, weights(4).items(), loop)
        links[:] = [second.link]
        until(lambda: second.versions == [4])
    assert [(r.version, r.error) for r in reports] == [(4, "LoadFailed: injected"), (4, None)]
    assert "resume" not in failing.events
    assert checksum(again.weights.items()) == checksum(weights(4).items())
    loop.call_soon_threadsafe(second.stop.set)
    second.ended.result(30)


class RecordingLink:
    """An engine that accepts every call (an `EngineLink`)."""

    engine_id, workers = "e0", 1

    def pause(self, *_: Any) -> None:
        pass

    transfer = resume = give_up = pause


def recording(sent: list[Weights]) -> Callable[..., SimpleNamespace]:
    """Return a `Connect` whose connections record the weights that they send."""
    return lambda *_: SimpleNamespace(
        send=lambda weights, transfer: sent.append(weights), close=lambda: None
    )


def test_an_engine_that_joins_during_a_publish_gets_the_copy_of_the_version_before(weights) -> None:
    links, digests = [], []

    def connect(*_: Any) -> SimpleNamespace:
        send = lambda weights, transfer: digests.append(checksum(weights))  # noqa: E731
        return SimpleNamespace(send=send, close=lambda: None)

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

    with DirectPublisher(engines, recording(sent), [].append, seed_seconds=1000.0) as publisher:
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

    with DirectPublisher(engines, connect, [].append, timeout=0.01) as publisher:
        publisher.publish(0, weights(0).items())
        threading.Event().wait(0.05)
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
    loop.call_soon_threadsafe(running.stop.set)
    running.ended.result(30)


async def settled(condition) -> None:
    """Wait for a condition of this loop; fail at a deadline."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110  (what it waits for has no event)
            await asyncio.sleep(0)


async def bring(receiver: DirectReceiver, version: int, attempt: str) -> int | None:
    served = await receiver.pause(version, attempt)
    await receiver.transfer(attempt, "start_weight_update", None)
    await receiver.transfer(attempt, "update_weights", update_of(TENSORS))
    await receiver.transfer(attempt, "finish_weight_update", None)
    await receiver.resume(attempt)
    return served


async def test_calls_outside_their_attempt_are_refused_and_have_no_effect() -> None:
    engine, stop = FakeEngine(), asyncio.Event()
    receiver = receiver_of(engine)
    running = asyncio.create_task(receiver.run(stop))
    for late in (receiver.transfer("x", "start_weight_update", None), receiver.resume("x")):
        with pytest.raises(UpdateRefused, match="this attempt to send weights is over"):
            await late
    assert await bring(receiver, 3, "one") is None
    await settled(lambda: receiver.handled_version == 3)
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
    receiver = receiver_of(engine)
    running = asyncio.create_task(receiver.run(asyncio.Event()))
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
    receiver = receiver_of(FakeEngine(), timeout=0.01)
    running = asyncio.create_task(receiver.run(asyncio.Event()))
    await receiver.pause(2, "one")
    with pytest.raises(DeadlineExceeded, match=r"version 2 was not whole within 0.01 s"):
        await running


async def test_another_learner_finds_a_mixture_and_the_engine_ends() -> None:
    receiver = receiver_of(FakeEngine())
    running = asyncio.create_task(receiver.run(asyncio.Event()))
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
    receiver = receiver_of(engine)
    running = asyncio.create_task(receiver.run(asyncio.Event()))
    await receiver.pause(0, "one")
    with suppress(IncompatibleWeights):
        await receiver.transfer("one", "update_weights", update_of(tensors))
    with pytest.raises((IncompatibleWeights, UpdateRefused)):
        await receiver.transfer("one", "finish_weight_update", None)
    with pytest.raises(IncompatibleWeights, match=message):
        await running
    assert "finish_weight_update" not in engine.events


async def test_the_learner_does_not_wait_for_who_uses_the_version_and_the_next_is_refused() -> None:
    evaluated, versions, stop = asyncio.Event(), [], asyncio.Event()

    async def on_version(version: int) -> None:
        versions.append(version)
        await evaluated.wait()

    receiver = receiver_of(FakeEngine(), on_version=on_version)
    running = asyncio.create_task(receiver.run(stop))
    await bring(receiver, 0, "one")
    await settled(lambda: versions == [0])
    with pytest.raises(UpdateRefused, match="version 1 was refused: version 0 is still in use"):
        await receiver.pause(1, "two")
    evaluated.set()
    await settled(lambda: receiver.handled_version == 0)
    await bring(receiver, 1, "three")
    await settled(lambda: versions == [0, 1])
    stop.set()
    await running


async def test_an_engine_is_known_while_it_works_and_until_it_is_released() -> None:
    broadcaster, stop = Broadcaster(1.0, 1), asyncio.Event()

    async def join() -> None:
        await broadcaster.join("e0", "a handle", 2)

    running = asyncio.create_task(DirectReceiver(FakeEngine(), join, expected={}).run(stop))
    await asyncio.sleep(0)
    assert await broadcaster.engines() == {"e0": ("a handle", 2)}
    await broadcaster.release("e0")
    assert await broadcaster.engines() == {}
    stop.set()
    await running


async def test_an_engine_registers_again_since_a_broadcaster_may_be_restarted(monkeypatch) -> None:
    monkeypatch.setattr("weight_sync.direct.direct_receiver.JOIN_SECONDS", 0.01)

    joined, stop = asyncio.Semaphore(0), asyncio.Event()

    async def join() -> None:
        joined.release()

    running = asyncio.create_task(DirectReceiver(FakeEngine(), join, expected={}).run(stop))
    for _ in range(3):
        await asyncio.wait_for(joined.acquire(), 10)
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

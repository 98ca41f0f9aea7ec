"""Learner, engine and what is between them without staging, with an engine that is a fake."""

import asyncio
import threading
from typing import Any

import pytest
import torch

from weight_sync.broadcaster import Broadcaster
from weight_sync.checksum import checksum
from weight_sync.direct import DirectEngines, Weights
from weight_sync.direct_publisher import DirectPublisher
from weight_sync.direct_receiver import DirectReceiver
from weight_sync.errors import LoadFailed, PublishFailed, VersionOrderError
from weight_sync.vllm_transfer import METHODS


class FakeEngine:
    """An engine whose weights others write (a `DirectEngine`), and what was asked of it."""

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
            self.weights = {name: tensor.clone() for name, tensor in payload["update_info"]}

    async def serve(self, version: int) -> None:
        self.events.append(f"serve {version}")

    async def resume(self) -> None:
        self.events.append("resume")


class Link:
    """An engine in the event loop of another thread (an `EngineLink`)."""

    def __init__(self, receiver: DirectReceiver, loop: asyncio.AbstractEventLoop) -> None:
        self.engine_id, self.workers = "e0", 1
        self._receiver, self._loop = receiver, loop

    def _call(self, answer: Any) -> None:
        asyncio.run_coroutine_threadsafe(answer, self._loop).result(30)

    def pause(self, version: int) -> None:
        self._call(self._receiver.pause(version))

    def transfer(self, method: str, payload: dict[str, Any] | None) -> None:
        self._call(self._receiver.transfer(method, payload))

    def resume(self, version: int) -> None:
        self._call(self._receiver.resume(version))


class FakeSender:
    """Speaks to the endpoint in the order of vLLM's trainer engines (a `Sender`)."""

    def __init__(self, link: Link) -> None:
        self._link = link
        link.transfer("init_weight_transfer_engine", {})

    def send(self, weights: Weights) -> None:
        self._link.transfer("start_weight_update", None)
        self._link.transfer("update_weights", {"update_info": weights})
        self._link.transfer("finish_weight_update", None)

    def close(self) -> None:
        pass


@pytest.fixture
def loop():
    """An event loop of an actor's process."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def until(condition) -> None:
    """Waits for a condition of another thread; fails at a deadline."""
    for _ in range(1000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it never came true")


def receiver_of(engine: FakeEngine, versions: list[int] | None = None) -> DirectReceiver:
    async def on_version(version: int) -> None:
        (versions if versions is not None else []).append(version)

    async def join() -> None:
        engine.events.append("join")

    return DirectReceiver(engine, join, on_version=on_version)


TRANSFER = ["start_weight_update", "update_weights", "finish_weight_update"]


def test_publish_returns_after_a_copy_and_engines_get_that_copy(loop, weights) -> None:
    engine, served, reports = FakeEngine(), [], []
    link = Link(receiver_of(engine, served), loop)
    sent = threading.Event()

    def engines():
        assert sent.wait(30)
        return [link]

    with DirectPublisher(
        DirectEngines(engines, lambda link, _: FakeSender(link), reports.append)
    ) as publisher:
        tensors = weights(0)
        digest = publisher.publish(0, tensors.items())
        for tensor in tensors.values():
            tensor.zero_()
        sent.set()
        publisher.flush(30)
        publisher.publish(1, weights(1).items())
        publisher.flush(30)
    assert digest == checksum(weights(0).items())
    assert checksum(engine.weights.items()) == checksum(weights(1).items())
    assert engine.events == [
        *["pause", "init_weight_transfer_engine", *TRANSFER, "serve 0", "resume"],
        *["pause", *TRANSFER, "serve 1", "resume"],
    ]
    assert served == [0, 1]
    assert [(r.version, r.error, r.seeding) for r in reports] == [(0, None, True), (1, None, False)]
    for r in reports:
        assert r.published_at <= r.staged_at == r.swap_started_at <= r.swap_finished_at


def test_an_engine_that_failed_or_came_later_gets_the_newest_version_by_itself(
    loop, weights
) -> None:
    failing, late = FakeEngine(), FakeEngine()
    failing.fails = 1
    links, reports = [Link(receiver_of(failing), loop)], []
    engines = DirectEngines(lambda: links, lambda link, _: FakeSender(link), reports.append)
    with DirectPublisher(engines) as publisher:
        publisher.idle_seconds = 0.01
        publisher.publish(4, weights(4).items())
        until(lambda: "resume" in failing.events)
        assert [(r.version, r.error) for r in reports] == [
            (4, "LoadFailed: injected"),
            (4, None),
        ]
        assert failing.events.index("resume") > failing.events.index("serve 4")
        links[:] = [Link(receiver_of(late), loop)]
        until(lambda: "resume" in late.events)
    for engine in (failing, late):
        assert checksum(engine.weights.items()) == checksum(weights(4).items())


def test_the_copy_that_is_sent_again_is_not_the_one_that_the_next_publish_writes_to(
    weights,
) -> None:
    engines = DirectEngines(list, lambda link, _: FakeSender(link), [].append)
    with DirectPublisher(engines) as publisher:
        for version in range(4):
            publisher.publish(version, weights(version).items())
            publisher.flush(30)
            assert publisher._newest not in publisher._idle
            assert len(publisher._idle) <= 1
            assert checksum(publisher._newest.tensors) == checksum(weights(version).items())


def test_engines_that_cannot_be_asked_for_fail_the_next_publish(weights) -> None:
    def engines():
        raise ConnectionError("no broadcaster")

    publisher = DirectPublisher(DirectEngines(engines, lambda link, _: FakeSender(link), [].append))
    publisher.publish(0, weights(0).items())
    with pytest.raises(PublishFailed, match="version 0 failed: no broadcaster"):
        publisher.flush(30)
    publisher.close()


def test_a_failure_between_versions_is_raised_by_the_next_publish_and_the_one_after_is_sent(
    loop, weights
) -> None:
    engine, asked = FakeEngine(), []
    link = Link(receiver_of(engine), loop)

    def engines():
        asked.append(True)
        if len(asked) == 2:
            raise ConnectionError("no broadcaster")
        return [link]

    direct = DirectEngines(engines, lambda link, _: FakeSender(link), [].append)
    with DirectPublisher(direct) as publisher:
        publisher.idle_seconds = 0.01
        publisher.publish(0, weights(0).items())
        until(lambda: publisher._failed)
        with pytest.raises(PublishFailed, match="version 0 failed: no broadcaster"):
            publisher.publish(1, weights(1).items())
        publisher.publish(2, weights(2).items())
        publisher.flush(30)
    assert checksum(engine.weights.items()) == checksum(weights(2).items())


def test_an_engine_that_is_not_paused_takes_nothing_and_late_words_have_no_effect() -> None:
    async def run() -> None:
        engine, served = FakeEngine(), []
        receiver = receiver_of(engine, served)
        with pytest.raises(VersionOrderError, match="start_weight_update was asked of an engine"):
            await receiver.transfer("start_weight_update", None)
        await receiver.pause(3)
        await receiver.pause(4)
        await receiver.resume(3)
        assert (engine.events, served, receiver.version) == (["pause", "pause"], [], None)
        with pytest.raises(VersionOrderError, match="version 3 comes after version 4"):
            await receiver.pause(3)
        await receiver.resume(4)
        await receiver.resume(4)
        assert engine.events[2:] == ["serve 4", "resume"]
        assert (served, receiver.version) == ([4], 4)

    asyncio.run(run())


def test_an_engine_is_known_while_it_works_and_until_it_is_released() -> None:
    async def run() -> None:
        broadcaster, stop = Broadcaster(1.0, 1), asyncio.Event()

        async def join() -> None:
            await broadcaster.join("e0", "a handle", 2)

        running = asyncio.create_task(DirectReceiver(FakeEngine(), join).run(stop))
        await asyncio.sleep(0)
        assert await broadcaster.engines() == {"e0": ("a handle", 2)}
        await broadcaster.release("e0")
        assert await broadcaster.engines() == {}
        stop.set()
        await running

    asyncio.run(run())


@pytest.mark.vllm
def test_vllms_endpoint_is_called_in_its_own_terms() -> None:
    from weight_sync.vllm_transfer import transfer

    calls = []

    class Endpoint:
        def __getattr__(self, name: str):
            async def method(*arguments: Any) -> None:
                calls.append((name, *arguments))

            return method

    async def run() -> None:
        payloads = [{"rank_offset": 1}, None, {"update_info": {"names": ["a"]}}, None]
        for method, payload in zip(METHODS, payloads, strict=True):
            await transfer(Endpoint(), method, payload)
        with pytest.raises(ValueError, match="method is 'explode'; expected one of"):
            await transfer(Endpoint(), "explode", None)

    asyncio.run(run())
    assert [name for name, *_ in calls] == list(METHODS)
    assert calls[0][1].init_info == {"rank_offset": 1}
    assert calls[2][1].update_info == {"names": ["a"]}

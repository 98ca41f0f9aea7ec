"""A receiver verifies before it swaps; a failure leaves the old version or a paused engine."""

import asyncio
import os
import re
import threading
from dataclasses import replace

import pytest
import torch

from tests.waiting import reached
from tests.weight_sync.conftest import Sender, open_files, same, threads_end
from weight_sync.broadcaster import Broadcaster
from weight_sync.errors import DeadlineExceeded, IncompatibleWeights, LoadFailed
from weight_sync.manifest import Manifest
from weight_sync.receive.receiver import NEWEST_SECONDS, Receiver

pytestmark = pytest.mark.timeout(60)


def swap(version: int) -> list[str]:
    return ["pause", f"load {version}", "resume"]


def with_tensor(manifest: Manifest, tensor: str, /, **changes: object) -> Manifest:
    tensors = [replace(s, **changes) if s.name == tensor else s for s in manifest.tensors]
    return replace(manifest, tensors=tuple(tensors))


def with_first_bucket(manifest: Manifest, **changes: object) -> Manifest:
    first, *rest = manifest.buckets
    return replace(manifest, buckets=(replace(first, **changes), *rest))


async def test_an_update_pauses_loads_and_resumes_in_order(
    engine, published, weights, broadcaster, receiver_of
) -> None:
    receiver = receiver_of()
    assert receiver.version is None
    report = await receiver.update(published(3))
    assert await broadcaster.reports(0) == [report]
    assert await broadcaster.reports(1) == []
    assert engine.events == swap(3)
    assert (receiver.version, receiver.paused) == (3, False)
    assert same(engine.weights, weights(3))
    assert (report.engine_id, report.version, report.error) == ("e0", 3, None)
    assert report.published_at <= report.staged_at <= report.swap_started_at
    assert report.swap_started_at <= report.swap_finished_at
    assert report.stalled_seconds <= report.swap_finished_at - report.swap_started_at + 0.01
    assert report.bytes == published(4).nbytes


def lose_a_bucket(manifest: Manifest) -> Manifest:
    return with_first_bucket(manifest, location=f"/proc/{os.getpid()}/fd/999999")


def truncate_a_bucket(manifest: Manifest) -> Manifest:
    descriptor = os.memfd_create("short", os.MFD_ALLOW_SEALING)
    os.write(descriptor, bytes(8))
    return with_first_bucket(manifest, location=f"/proc/{os.getpid()}/fd/{descriptor}")


FAULTS = {
    "bad checksum": (lambda m: with_first_bucket(m, checksum="0" * 32), "StagingError"),
    "lost bucket": (lose_a_bucket, "StagingError"),
    "truncated bucket": (truncate_a_bucket, "StagingError.*has 8 bytes"),
    "wrong dtype": (
        lambda m: with_tensor(m, "norm", dtype="bfloat16"),
        "IncompatibleWeights.*'norm'.*bfloat16",
    ),
    "wrong shape": (lambda m: with_tensor(m, "q", shape=(49,)), "IncompatibleWeights.*'q'"),
    "foreign name": (lambda m: with_tensor(m, "q", name="k"), r"IncompatibleWeights.*\(k\)"),
    "missing tensor": (
        lambda m: replace(m, tensors=m.tensors[:-1]),
        r"IncompatibleWeights.*lacks 1.*\(head\)",
    ),
    "older version": (lambda m: replace(m, version=2), "VersionOrderError.*serves 3 already"),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_faulty_version_is_refused_before_the_engine_is_touched(
    engine, published, weights, receiver_of, fault: str
) -> None:
    break_it, message = FAULTS[fault]
    receiver = receiver_of()
    await receiver.update(published(3))
    report = await receiver.update(break_it(published(4)))
    assert engine.events == swap(3)
    assert (receiver.version, receiver.paused) == (3, False)
    assert same(engine.weights, weights(3))
    assert re.match(message, report.error), report.error
    assert (report.swap_started_at, report.swap_finished_at) == (None, None)


async def test_the_loop_ends_when_the_first_version_has_other_tensors_than_the_engine(
    engine, published, broadcaster, receiver_of
) -> None:
    manifest = published(0)
    good = {name: (None, shape) for name, (_, shape) in manifest.signature.items()}
    await broadcaster.announce(manifest)
    with pytest.raises(IncompatibleWeights, match=r"lacks 1 that it needs \(bias\)"):
        await receiver_of(expected=good | {"bias": (None, (7,))}).run(asyncio.Event())
    [refused] = await broadcaster.reports(0)
    assert "lacks 1 that it needs (bias)" in refused.error
    assert engine.events == []
    taken = await receiver_of(expected=good).update(manifest)
    assert (taken.error, await broadcaster.reports(1)) == (None, [taken])


async def test_the_loop_goes_on_when_a_later_version_is_of_another_model(
    engine, published, broadcaster, receiver_of
) -> None:
    receiver = receiver_of(retry_seconds=0.01)
    await broadcaster.announce(published(0))
    await follow(receiver, broadcaster, 1)
    await broadcaster.announce(with_tensor(published(1), "q", shape=(49,)))
    await follow(receiver, broadcaster, 2)
    await broadcaster.announce(published(2))
    while receiver.version != 2:
        await follow(receiver, broadcaster, len(await broadcaster.reports(0)) + 1)
    assert engine.events == swap(0) + swap(2)


async def test_a_failed_load_stays_paused_until_a_full_load_succeeds(
    engine, published, weights, broadcaster, receiver_of
) -> None:
    engine.failing_loads = 2
    receiver = receiver_of()
    first = await receiver.update(published(3))
    assert (receiver.version, receiver.paused) == (None, True)
    second = await receiver.update(published(4))
    third = await receiver.update(published(5))
    assert await broadcaster.reports(0) == [first, second, third]
    assert engine.events == ["pause", "load 3", "load 4", "load 5", "resume"]
    assert (receiver.version, receiver.paused) == (5, False)
    assert (first.error, first.swap_finished_at) == ("LoadFailed: injected", None)
    assert (third.error, third.pause_seconds < 0.01) == (None, True)
    assert same(engine.weights, weights(5))


@pytest.mark.parametrize(
    ("fault", "loads", "raised", "message"),
    [
        (None, 3, LoadFailed, "3 loads failed, the last: injected"),
        (ConnectionResetError("gone"), 1, ConnectionResetError, "gone"),
    ],
)
async def test_an_engine_that_no_load_repairs_ends_the_loop_and_gives_its_permit_back(
    engine, published, broadcaster, receiver_of, fault, loads, raised, message
) -> None:
    engine.failing_loads, engine.error = 5, fault
    await broadcaster.announce(published(3))
    with pytest.raises(raised, match=message):
        await receiver_of(retry_seconds=0.001, failed_loads=3).run(asyncio.Event())
    assert await broadcaster.acquire_swap("e1", 0.0)
    error = "ConnectionResetError: gone" if fault else "LoadFailed: injected"
    assert [report.error for report in await broadcaster.reports(0)] == [error] * loads
    assert engine.events == ["pause", *["load 3"] * loads]


async def test_failed_loads_are_counted_in_a_row(engine, published, receiver_of) -> None:
    receiver = receiver_of()
    await receiver.update(published(0))
    for version in (1, 2, 3):
        engine.failing_loads = 2
        for attempt in range(3):
            report = await receiver.update(published(3 * version + attempt))
        assert report.error is None


async def test_an_engine_prepares_what_was_verified_before_it_is_paused(
    engine, published, receiver_of
) -> None:
    engine.preparing = asyncio.Event()
    running = asyncio.create_task(receiver_of().update(published(3)))
    await reached(lambda: engine.prepared)
    assert engine.events == []
    engine.preparing.set()
    report = await running
    assert (engine.prepared, engine.events) == ([3], swap(3))
    assert report.prepare_seconds > 0
    assert report.staged_at + report.prepare_seconds <= report.swap_started_at + 0.01


async def test_an_engine_that_prepares_for_ever_is_named_and_was_not_paused(
    engine, published, receiver_of
) -> None:
    engine.preparing = asyncio.Event()
    with pytest.raises(DeadlineExceeded, match=r"e0 did not prepare version 3 within 0\.2 s"):
        await receiver_of(timeout=0.2).update(published(3))
    assert engine.events == []


async def test_staged_memory_is_given_back_whatever_happens(engine, published, receiver_of) -> None:
    manifest, before = published(0), open_files()
    engine.failing_loads = 1
    receiver = receiver_of()
    await receiver.update(manifest)
    await receiver.update(with_first_bucket(manifest, checksum="0" * 32))
    await receiver.update(manifest)
    assert open_files() == before


@pytest.mark.parametrize("left_by", ["deadline", "cancellation"])
async def test_what_was_staged_too_late_is_given_back_when_its_thread_ends(
    engine, transport, published, receiver_of, left_by: str
) -> None:
    manifest, before = published(0), open_files()
    begun, opens = threading.Event(), threading.Event()

    class Slow:
        def open(self, bucket):
            begun.set()
            opens.wait(30)
            return transport.open(bucket)

    receiver = receiver_of(Slow(), timeout=0.05 if left_by == "deadline" else 30)
    task = asyncio.create_task(receiver.update(manifest))
    if left_by == "cancellation":
        assert await asyncio.to_thread(begun.wait, 30)
        task.cancel()
    [outcome] = await asyncio.gather(task, return_exceptions=True)
    opens.set()
    await threads_end()
    if left_by == "deadline":
        assert "not verified within 0.05 s of the last progress" in outcome.error
    else:
        assert isinstance(outcome, asyncio.CancelledError)
    assert engine.events == []
    assert open_files() == before


async def follow(receiver: Receiver, broadcaster: Broadcaster, attempts: int) -> list:
    """Run a receiver until it has reported `attempts` times and return its reports."""
    stop = asyncio.Event()
    running = asyncio.create_task(receiver.run(stop))
    while len(await broadcaster.reports(0)) < attempts and not running.done():  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    stop.set()
    await running
    return await broadcaster.reports(0)


async def test_the_loop_takes_the_newest_version_and_skips_those_between(
    engine, published, broadcaster, receiver_of
) -> None:
    served = asyncio.Queue()
    receiver = receiver_of(on_version=served.put)
    for version in range(4):
        await broadcaster.announce(published(version))
    assert [report.version for report in await follow(receiver, broadcaster, 1)] == [3]
    await broadcaster.announce(published(7))
    assert [report.version for report in await follow(receiver, broadcaster, 2)] == [3, 7]
    assert engine.events == swap(3) + swap(7)
    assert [served.get_nowait(), served.get_nowait(), served.empty()] == [3, 7, True]


async def test_the_loop_that_waits_for_a_version_ends_at_stop(engine, transport) -> None:
    asked: list[float] = []

    class Silent(Broadcaster):
        async def newest(self, after: int, timeout: float, digest: str | None = None) -> None:
            asked.append(timeout)
            await asyncio.Event().wait()

    stop = asyncio.Event()
    running = asyncio.create_task(Receiver("e0", engine, Silent(1.0, 1), transport).run(stop))
    await reached(lambda: asked)
    stop.set()
    async with asyncio.timeout(NEWEST_SECONDS / 2):
        await running
    assert asked == [NEWEST_SECONDS]
    assert engine.events == []


async def test_a_version_that_is_published_anew_is_not_kept_waiting_by_the_failure_before(
    published, broadcaster, receiver_of
) -> None:
    """The learner died with the memory of its version, and others made the same one."""
    good = published(1)
    await broadcaster.announce(lose_a_bucket(good))
    following = asyncio.create_task(follow(receiver_of(retry_seconds=1e6), broadcaster, 2))
    while not await broadcaster.reports(0):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await broadcaster.announce(replace(good, created_at=good.created_at + 1), epoch=1)
    failed, taken = await following
    assert failed.error
    assert taken.error is None


async def test_a_newer_version_replaces_one_that_waits_for_a_permit(
    engine, transport, published
) -> None:
    asked = asyncio.Event()

    class Watched(Broadcaster):
        async def acquire_swap(self, engine_id: str, timeout: float) -> bool:
            asked.set()
            return await super().acquire_swap(engine_id, timeout)

    broadcaster, old = Watched(1.0, 1), published(1)
    receiver = Receiver("e0", engine, broadcaster, transport)
    assert await broadcaster.acquire_swap("other", 0.0)
    asked.clear()
    await broadcaster.announce(old)
    waiting = asyncio.create_task(receiver.update(old))
    await asked.wait()
    await broadcaster.announce(replace(old, version=2))
    assert await waiting is None
    assert engine.events == []


class Following:
    """A receiver that follows a publisher, and the versions that its engine serves in turn."""

    def __init__(self, receiver_of, broadcaster: Broadcaster, sender: Sender) -> None:
        self._broadcaster, self._sender = broadcaster, sender
        self._served, self._stop = asyncio.Queue(), asyncio.Event()
        self.receiver = receiver_of(on_version=self._served.put, keep_base=True)
        self._running = asyncio.create_task(self.receiver.run(self._stop))

    async def publish(self, version: int, tensors: dict, epoch: int = 0) -> None:
        await self._broadcaster.announce(self._sender(epoch).send(version, tensors), epoch)

    async def serves(self, version: int) -> None:
        while await self._served.get() != version:
            pass

    async def end(self) -> None:
        self._stop.set()
        await self._running
        self.receiver.close()


@pytest.mark.parametrize("other", [False, True])
async def test_a_version_that_the_learner_made_anew_is_loaded_again_if_its_weights_differ(
    engine, transport, weights, broadcaster, receiver_of, other
) -> None:
    """The learner goes back to version 1 and trains batch 1 again; engines serve version 2."""
    first, anew = weights(2), {**weights(2), "scale": torch.tensor(7.0)} if other else weights(2)
    learners = [Sender(transport) for _ in range(2)]
    following = Following(receiver_of, broadcaster, learners.__getitem__)
    for epoch, version, tensors, taken in (
        (0, 2, first, True),
        (1, 1, weights(1), False),
        (1, 2, anew, other),
        (1, 3, weights(3), True),
    ):
        await following.publish(version, tensors, epoch)
        if taken:
            await following.serves(version)
            assert same(engine.weights, tensors)
    await following.end()
    again = swap(2) if other else []
    assert engine.events == [*swap(2), *again, *swap(3)]
    assert engine.prepared == [2, 3]


@pytest.mark.parametrize("newer", [False, True])
async def test_weights_are_sent_again_whole_and_unprepared_though_the_engine_serves_them(
    engine, transport, weights, broadcaster, receiver_of, newer
) -> None:
    sent = {1: weights(1)}
    for version in (2, 3, 4):  # one element changes
        sent[version] = {**sent[version - 1], "scale": torch.tensor(float(version))}
    sender = Sender(transport, codec="delta")
    following = Following(receiver_of, broadcaster, lambda epoch: sender)
    for version in (1, 2):
        await following.publish(version, sent[version])
        await following.serves(version)
    engine.weights["q"] += 1.0
    again = [asyncio.create_task(following.receiver.resend()) for _ in range(2)]
    if newer:
        await following.publish(3, sent[3])
    await asyncio.gather(*again)
    assert torch.equal(engine.weights["q"], sent[2]["q"])
    await following.publish(4, sent[4])
    await following.serves(4)
    await following.end()
    reports = await broadcaster.reports(0)
    third = 3 if newer else 2
    assert [report.version for report in reports] == [1, 2, third, 4]
    assert [report.codec for report in reports[:3]] == ["full", "delta", "full"]
    assert engine.prepared == [1, 2, 4]
    assert engine.events == [*swap(1), *swap(2), *swap(third), *swap(4)]

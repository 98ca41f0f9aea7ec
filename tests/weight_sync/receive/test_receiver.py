"""A receiver verifies before it swaps; a failure leaves the old version or a paused engine."""

import asyncio
import os
import re
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.weight_sync.conftest import send, threads_end
from weight_sync.broadcaster import Broadcaster
from weight_sync.errors import DeadlineExceeded, IncompatibleWeights, LoadFailed
from weight_sync.manifest import Manifest
from weight_sync.publish.staged_publisher import StagedPublisher
from weight_sync.receive.receiver import NEWEST_SECONDS, Receiver, ReceiverOptions


def swap(version: int) -> list[str]:
    return ["pause", f"load {version}", "resume"]


def with_tensor(manifest: Manifest, tensor: str, /, **changes: object) -> Manifest:
    tensors = [replace(s, **changes) if s.name == tensor else s for s in manifest.tensors]
    return replace(manifest, tensors=tuple(tensors))


def with_first_bucket(manifest: Manifest, **changes: object) -> Manifest:
    first, *rest = manifest.buckets
    return replace(manifest, buckets=(replace(first, **changes), *rest))


def serve(engine, transport, manifest: Manifest, **options: Any):
    """Return a receiver, its broadcaster and its update to `manifest`; call inside a loop."""
    broadcaster = Broadcaster(1.0, 1)
    receiver = Receiver("e0", engine, broadcaster, transport, options=ReceiverOptions(**options))
    return receiver, broadcaster, receiver.update(manifest)


async def announced(engine, transport, manifest: Manifest, **options: Any):
    """Return a receiver, and a broadcaster that has announced a version to it."""
    broadcaster = Broadcaster(1.0, 1)
    await broadcaster.announce(manifest)
    options = ReceiverOptions(**options)
    return Receiver("e0", engine, broadcaster, transport, options=options), broadcaster


async def test_an_update_pauses_loads_and_resumes_in_order(
    engine, transport, published, weights
) -> None:
    receiver, broadcaster, update = serve(engine, transport, published(3))
    assert receiver.version is None
    report = await update
    assert await broadcaster.reports(0) == [report]
    assert await broadcaster.reports(1) == []
    assert engine.events == swap(3)
    assert (receiver.version, receiver.paused) == (3, False)
    assert all(torch.equal(engine.weights[name], w) for name, w in weights(3).items())
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
    engine, transport, published, weights, fault: str
) -> None:
    break_it, message = FAULTS[fault]

    receiver, _, update = serve(engine, transport, published(3))
    await update
    broken = break_it(replace(published(4), version=4))
    report = await receiver.update(broken)
    assert engine.events == swap(3)
    assert (receiver.version, receiver.paused) == (3, False)
    assert torch.equal(engine.weights["q"], weights(3)["q"])
    assert re.match(message, report.error), report.error
    assert (report.swap_started_at, report.swap_finished_at) == (None, None)


async def test_a_first_version_is_compared_with_the_tensors_of_the_engine(
    engine, transport, published
) -> None:
    manifest = published(0)
    good = {name: (None, shape) for name, (_, shape) in manifest.signature.items()}
    wrong = good | {"bias": (None, (7,))}
    _, broadcaster, update = serve(engine, transport, manifest, expected=wrong)
    with pytest.raises(IncompatibleWeights):
        await update
    [refused] = await broadcaster.reports(0)
    assert "lacks 1 that it needs (bias)" in refused.error
    assert engine.events == []
    _, broadcaster, update = serve(engine, transport, manifest, expected=good)
    taken = await update
    assert (taken.error, await broadcaster.reports(0)) == (None, [taken])


async def test_the_loop_ends_when_the_first_version_is_of_another_model(
    engine, transport, published
) -> None:
    receiver, _ = await announced(engine, transport, published(0), expected={"q": (None, (7, 7))})
    async with asyncio.timeout(10):
        with pytest.raises(IncompatibleWeights, match="does not know"):
            await receiver.run(asyncio.Event())
    assert engine.events == []


async def test_the_loop_goes_on_when_a_later_version_is_of_another_model(
    engine, transport, published
) -> None:
    receiver, broadcaster = await announced(engine, transport, published(0), retry_seconds=0.01)
    await follow(receiver, broadcaster, 1)
    await broadcaster.announce(with_tensor(published(1), "q", shape=(49,)))
    await follow(receiver, broadcaster, 2)
    await broadcaster.announce(published(2))
    while receiver.version != 2:
        await follow(receiver, broadcaster, len(await broadcaster.reports(0)) + 1)
    assert engine.events == swap(0) + swap(2)


async def test_a_failed_load_stays_paused_until_a_full_load_succeeds(
    engine, transport, published, weights
) -> None:
    engine.failing_loads = 2

    receiver, broadcaster, update = serve(engine, transport, published(3))
    first = await update
    assert (receiver.version, receiver.paused) == (None, True)
    second = await receiver.update(published(4))
    third = await receiver.update(published(5))
    assert await broadcaster.reports(0) == [first, second, third]
    assert engine.events == ["pause", "load 3", "load 4", "load 5", "resume"]
    assert (receiver.version, receiver.paused) == (5, False)
    assert (first.error, first.swap_finished_at) == ("LoadFailed: injected", None)
    assert (third.error, third.pause_seconds < 0.01) == (None, True)
    assert torch.equal(engine.weights["q"], weights(5)["q"])


async def test_an_engine_that_fails_to_load_again_and_again_ends_the_loop(
    engine, transport, published
) -> None:
    engine.failing_loads = 5

    receiver, broadcaster = await announced(
        engine, transport, published(3), retry_seconds=0.001, failed_loads=3
    )
    async with asyncio.timeout(10):
        with pytest.raises(LoadFailed, match="3 loads failed, the last: injected"):
            await receiver.run(asyncio.Event())
    assert await broadcaster.acquire_swap("e1", 0.0)
    errors = [report.error for report in await broadcaster.reports(0)]
    assert errors == ["LoadFailed: injected"] * 3
    assert engine.events == ["pause", "load 3", "load 3", "load 3"]


async def test_failed_loads_are_counted_in_a_row(engine, transport, published) -> None:
    receiver, _, update = serve(engine, transport, published(0))
    await update
    for version in (1, 2, 3):
        engine.failing_loads = 2
        for attempt in range(3):
            report = await receiver.update(published(3 * version + attempt))
        assert report.error is None


async def test_an_engine_beyond_repair_ends_the_loop_and_gives_its_permit_back(
    engine, transport, published
) -> None:
    engine.error = ConnectionResetError("gone")

    receiver, broadcaster = await announced(engine, transport, published(0))
    with pytest.raises(ConnectionResetError):
        await receiver.run(asyncio.Event())
    (report,) = await broadcaster.reports(0)
    assert report.error == "ConnectionResetError: gone"
    assert await broadcaster.acquire_swap("e1", 0.0)
    assert engine.events == ["pause", "load 0"]


async def test_an_engine_prepares_what_was_verified_before_it_is_paused(
    engine, transport, published
) -> None:
    engine.preparing = asyncio.Event()
    _, _, update = serve(engine, transport, published(3))
    running = asyncio.create_task(update)
    async with asyncio.timeout(10):
        while not engine.prepared:  # noqa: ASYNC110  (set by another task)
            await asyncio.sleep(0.01)
    assert engine.events == []
    engine.preparing.set()
    report = await running
    assert (engine.prepared, engine.events) == ([3], swap(3))
    assert report.prepare_seconds > 0
    assert report.staged_at + report.prepare_seconds <= report.swap_started_at + 0.01


async def test_an_engine_that_prepares_for_ever_is_named_and_was_not_paused(
    engine, transport, published
) -> None:
    engine.preparing = asyncio.Event()
    with pytest.raises(DeadlineExceeded, match=r"e0 did not prepare version 3 within 0\.2 s"):
        await serve(engine, transport, published(3), timeout=0.2)[2]
    assert engine.events == []


async def test_staged_memory_is_given_back_whatever_happens(engine, transport, published) -> None:
    manifest = published(0)
    before = len(os.listdir("/proc/self/fd"))
    engine.failing_loads = 1
    receiver, _, update = serve(engine, transport, manifest)
    await update
    await receiver.update(with_first_bucket(manifest, checksum="0" * 32))
    await receiver.update(manifest)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("left_by", ["deadline", "cancellation"])
async def test_what_was_staged_too_late_is_given_back_when_its_thread_ends(
    engine, transport, published, left_by: str
) -> None:
    manifest = published(0)
    before = len(os.listdir("/proc/self/fd"))
    begun, opens = threading.Event(), threading.Event()

    class Slow:
        def open(self, bucket):
            begun.set()
            opens.wait(30)
            return transport.open(bucket)

    _, _, update = serve(engine, Slow(), manifest, timeout=0.05 if left_by == "deadline" else 30)
    task = asyncio.create_task(update)
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
    assert len(os.listdir("/proc/self/fd")) == before


async def follow(receiver: Receiver, broadcaster: Broadcaster, attempts: int) -> list:
    """Run a receiver until it has reported `attempts` times and return its reports."""
    stop = asyncio.Event()
    running = asyncio.create_task(receiver.run(stop))
    async with asyncio.timeout(30):
        while len(await broadcaster.reports(0)) < attempts and not running.done():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    stop.set()
    async with asyncio.timeout(30):
        await running
    return await broadcaster.reports(0)


async def test_the_loop_takes_the_newest_version_and_skips_those_between(
    engine, transport, published
) -> None:
    served: list[int] = []

    async def on_version(version: int) -> None:
        served.append(version)

    broadcaster = Broadcaster(1.0, 1)
    for version in range(4):
        await broadcaster.announce(published(version))
    receiver = Receiver("e0", engine, broadcaster, transport, on_version=on_version)
    reports = await follow(receiver, broadcaster, 1)
    await broadcaster.announce(published(7))
    first, both = reports, await follow(receiver, broadcaster, 2)
    assert [report.version for report in first] == [3]
    assert [report.version for report in both] == [3, 7]
    assert engine.events == swap(3) + swap(7)
    assert served == [3, 7]


async def test_the_loop_that_waits_for_a_version_ends_at_stop(engine, transport) -> None:
    asked: list[float] = []
    waits = asyncio.Event()

    class Silent(Broadcaster):
        async def newest(self, after: int, timeout: float, digest: str | None = None) -> None:
            asked.append(timeout)
            waits.set()
            await asyncio.Event().wait()

    stop = asyncio.Event()
    running = asyncio.create_task(Receiver("e0", engine, Silent(1.0, 1), transport).run(stop))
    await waits.wait()
    stop.set()
    async with asyncio.timeout(NEWEST_SECONDS / 2):
        await running
    assert asked == [NEWEST_SECONDS]
    assert engine.events == []


async def test_the_loop_sends_a_version_again_until_it_is_loaded(
    engine, transport, published
) -> None:
    engine.failing_loads = 2

    receiver, broadcaster = await announced(engine, transport, published(1), retry_seconds=0.01)
    reports = await follow(receiver, broadcaster, 3)
    assert [report.error for report in reports] == ["LoadFailed: injected"] * 2 + [None]
    assert engine.events == ["pause", "load 1", "load 1", "load 1", "resume"]


async def test_a_version_that_is_published_anew_is_not_kept_waiting_by_the_failure_before(
    engine, transport, published
) -> None:
    """The learner died with the memory of its version, and others made the same one."""
    good = published(1)

    async with asyncio.timeout(30):
        receiver, broadcaster = await announced(
            engine, transport, lose_a_bucket(good), retry_seconds=1e6
        )
        following = asyncio.create_task(follow(receiver, broadcaster, 2))
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

    broadcaster = Watched(1.0, 1)
    receiver = Receiver("e0", engine, broadcaster, transport)
    assert await broadcaster.acquire_swap("other", 0.0)
    asked.clear()
    old = published(1)
    await broadcaster.announce(old)
    waiting = asyncio.create_task(receiver.update(old))
    async with asyncio.timeout(30):
        await asked.wait()
    await broadcaster.announce(replace(old, version=2))
    assert await waiting is None
    assert engine.events == []


@pytest.mark.parametrize("other", [False, True])
async def test_a_version_that_the_learner_made_anew_is_loaded_again_if_its_weights_differ(
    engine, transport, weights, other
) -> None:
    """The learner goes back to version 1 and trains batch 1 again; engines serve version 2."""
    first, anew = weights(2), {**weights(2), "scale": torch.tensor(7.0)} if other else weights(2)

    async with asyncio.timeout(10):
        broadcaster, stop, served = Broadcaster(1.0, 1), asyncio.Event(), asyncio.Queue()
        options = ReceiverOptions(keep_base=True)
        receiver = Receiver("e0", engine, broadcaster, transport, served.put, options)
        following = asyncio.create_task(receiver.run(stop))
        sent = [(0, 2, first), (1, 1, weights(1)), (1, 2, anew), (1, 3, weights(3))]
        for epoch, version, tensors in sent:
            manifests: list[Manifest] = []
            with StagedPublisher(transport, manifests.append) as publisher:
                send(publisher, version, tensors.items())
                await broadcaster.announce(manifests[0], epoch)
                if (epoch, version) != (1, 1) and (other or (epoch, version) != (1, 2)):
                    assert await served.get() == version
                    assert torch.equal(engine.weights["scale"], tensors["scale"])
        stop.set()
        await following
        receiver.close()
    again = swap(2) if other else []
    assert engine.events == [*swap(2), *again, *swap(3)]
    assert engine.prepared == [2, 3]


@pytest.mark.parametrize("newer", [False, True])
async def test_weights_are_sent_again_whole_and_unprepared_though_the_engine_serves_them(
    engine, transport, weights, newer
) -> None:
    manifests: list[Manifest] = []
    sent = {1: weights(1)}
    for version in (2, 3, 4):  # one element changes
        sent[version] = {**sent[version - 1], "scale": torch.tensor(float(version))}

    async with asyncio.timeout(10):
        broadcaster, stop, served = Broadcaster(1.0, 1), asyncio.Event(), asyncio.Queue()
        options = ReceiverOptions(keep_base=True)
        receiver = Receiver("e0", engine, broadcaster, transport, served.put, options)
        with StagedPublisher(transport, manifests.append, codec="delta") as publisher:

            async def publish(version):
                send(publisher, version, sent[version].items())
                await broadcaster.announce(manifests[-1])

            following = asyncio.create_task(receiver.run(stop))
            for version in (1, 2):
                await publish(version)
                assert await served.get() == version
            engine.weights["q"] += 1.0
            again = [asyncio.create_task(receiver.resend()) for _ in range(2)]
            if newer:
                await publish(3)
            await asyncio.gather(*again)
            assert torch.equal(engine.weights["q"], sent[2]["q"])
            await publish(4)
            while await served.get() < 4:
                pass
            stop.set()
            await following
            receiver.close()
        reports = await broadcaster.reports(0)
    third = 3 if newer else 2
    assert [report.version for report in reports] == [1, 2, third, 4]
    assert [report.codec for report in reports[:3]] == ["full", "delta", "full"]
    assert engine.prepared == [1, 2, 4]
    assert engine.events == [*swap(1), *swap(2), *swap(third), *swap(4)]

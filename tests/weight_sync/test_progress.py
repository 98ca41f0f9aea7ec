"""Deadlines follow from bytes and progress: what moves is left alone, what stalls is named."""

import asyncio
import threading
import time

import pytest
import torch

from tests.weight_sync.conftest import Sender, same, threads_end
from weight_sync.broadcaster import Broadcaster
from weight_sync.errors import DeadlineExceeded, StagingError
from weight_sync.manifest import Bucket
from weight_sync.progress import (
    LEAST_SWAPPED_BYTES_PER_SECOND,
    STREAMS,
    Progress,
    allowance,
    run_in_streams,
    show,
)
from weight_sync.receive.staging import stage
from weight_sync.transports.shared_memory import SharedMemoryTransport

SLOW = 50e6
"""Bytes per second of a slow transport."""
MANY = {f"t{number}": torch.full((2**18,), float(number)) for number in range(50)}
"""50 MiB in buckets of one tensor."""


class ThrottledTransport(SharedMemoryTransport):
    """Writes and opens at a limited rate, over all threads."""

    def __init__(self) -> None:
        super().__init__()
        self._line = threading.Lock()

    def _travel(self, nbytes: int) -> None:
        with self._line:
            time.sleep(nbytes / SLOW)

    def write(self, version, nbytes, pieces) -> Bucket:
        self._travel(nbytes)
        return super().write(version, nbytes, pieces)

    def open(self, bucket):
        self._travel(bucket.nbytes)
        return super().open(bucket)


async def test_no_deadline_fires_while_bytes_move_and_a_larger_tensor_has_its_time(
    receiver_of,
) -> None:
    """The whole takes several times its deadline, and one tensor alone half of it."""
    timeout = 0.5
    tensors = {**MANY, "large": torch.ones(int(SLOW * timeout) // 8)}
    transport = ThrottledTransport()
    begin = time.monotonic()
    with Sender(transport, 2**20, timeout=timeout) as publisher:
        publisher.publish(0, tensors.items())
        publisher.publish(1, [*MANY.items()][:1])
        publisher.flush(timeout)
        publisher.publish(2, tensors.items())
        publisher.flush(timeout)

        class Engine:
            async def prepare(self, weights) -> None:
                await asyncio.sleep(1.5 * timeout)  # what it loads takes longer than the timeout

            async def pause(self) -> None: ...
            async def resume(self) -> None: ...
            async def load(self, weights, version: int) -> None: ...

        receiver = receiver_of(transport, Engine(), timeout=timeout)
        assert (await receiver.update(publisher.manifests[-1])).error is None
    assert time.monotonic() - begin > 3 * 2.5 * timeout


def test_a_publication_that_stalls_is_named_within_its_deadline() -> None:
    go_on, written = threading.Event(), threading.Semaphore(0)

    class Stalls(SharedMemoryTransport):
        def write(self, version, nbytes, pieces) -> Bucket:
            if written.acquire(blocking=False):
                return super().write(version, nbytes, pieces)
            assert go_on.wait(30)
            return super().write(version, nbytes, pieces)

    written.release(5)
    timeout = 0.2
    limit = allowance(timeout, STREAMS * MANY["t0"].nbytes)
    publisher = Sender(Stalls(), 2**20, timeout=timeout)
    publisher.publish(3, MANY.items())
    with pytest.raises(
        DeadlineExceeded,
        match=rf"version 3 was not announced within {show(limit)} s of the last progress: 5 of 50 "
        "buckets are written",
    ):
        publisher.flush(timeout)
    with pytest.raises(DeadlineExceeded, match="version 3 was not announced within"):
        publisher.publish(4, MANY.items())
    go_on.set()
    publisher.flush(30)
    publisher.close()


async def test_staging_that_stalls_is_named_and_what_it_opened_is_closed(
    transport, receiver_of
) -> None:
    go_on, opened = threading.Event(), []
    manifest = Sender(transport, 2**20).send(3, MANY)

    class Stalls(SharedMemoryTransport):
        def open(self, bucket):
            if len(opened) >= 5:
                assert go_on.wait(30)
            opened.append(super().open(bucket))
            return opened[-1]

    report = await receiver_of(Stalls(), timeout=0.1).update(manifest)
    go_on.set()
    assert "version 3 was not verified within" in report.error
    assert "buckets are open" in report.error
    await threads_end()
    assert len(opened) == len(MANY)
    for bucket in opened:
        with pytest.raises(ValueError, match="was closed"):
            _ = bucket.memory


@pytest.mark.parametrize("hangs", ["pause", "load", "resume"])
async def test_a_swap_that_hangs_is_named_after_the_time_of_a_copy_in_memory(
    transport, broadcaster, receiver_of, hangs: str
) -> None:
    """Long before a transfer of the same bytes would be."""

    class HangingEngine:
        def __getattr__(self, step: str):
            async def call(*_: object) -> None:
                if step == hangs:
                    await asyncio.Event().wait()

            return call

    manifest = Sender(transport).send(3, MANY)
    with pytest.raises(DeadlineExceeded, match=r"e0 did not take version 3 within 1\.2 s"):
        await receiver_of(to=HangingEngine(), timeout=1.0).update(manifest)
    assert await broadcaster.acquire_swap("e1", 0.0), "its permit is given back"
    assert allowance(1.0, manifest.nbytes) > 2.9


@pytest.mark.parametrize(
    ("nbytes", "ends"), [(400, True), (int(LEAST_SWAPPED_BYTES_PER_SECOND), False)]
)
async def test_a_permit_lasts_as_long_as_the_load_of_the_version_may_take(
    transport, nbytes: int, ends: bool
) -> None:
    broadcaster = Broadcaster(1.0, 1, permit_seconds=0.01)
    await broadcaster.announce(Sender(transport).send(0, {"a": torch.zeros(nbytes // 4)}))
    assert await broadcaster.acquire_swap("e0", 0.0)
    assert await broadcaster.acquire_swap("e1", 0.2) == ends


def test_buckets_are_written_and_opened_several_at_a_time() -> None:
    meet = threading.Barrier(STREAMS, timeout=30)

    class Meets(SharedMemoryTransport):
        def write(self, version, nbytes, pieces) -> Bucket:
            meet.wait()
            return super().write(version, nbytes, pieces)

        def open(self, bucket):
            meet.wait()
            return super().open(bucket)

    transport, tensors = Meets(), {name: MANY[name] for name in [*MANY][: 2 * STREAMS]}
    with Sender(transport, 2**20) as publisher:
        staged = stage(publisher.send(0, tensors), transport)
        assert same(staged.tensors(), tensors)
        staged.close()


def test_the_first_error_of_a_stream_is_raised_and_finished_tasks_are_undone() -> None:
    undone: list[int] = []

    def fail() -> int:
        raise StagingError("gone")

    tasks = [lambda: 0, lambda: 1, fail, *[lambda: 9] * 50]
    with pytest.raises(StagingError, match="gone"):
        run_in_streams(Progress(1.0), "open", tasks, [1] * len(tasks), undone.append)
    assert {0, 1} <= set(undone)

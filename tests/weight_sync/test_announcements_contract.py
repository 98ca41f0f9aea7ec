"""The contract of `Announcements`, in-process and over Ray."""

import asyncio
import math
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import InputError
from weight_sync.announcements import WeightUpdateReport
from weight_sync.broadcaster import Broadcaster
from weight_sync.errors import VersionOrderError
from weight_sync.manifest import Bucket, Manifest, TensorSpec


def manifest(version: int) -> Manifest:
    return Manifest(
        version=version,
        tensors=(TensorSpec(name="a", dtype="float32", shape=(), bucket=0, offset=0),),
        buckets=(Bucket(nbytes=4, checksum="0" * 32, location=""),),
        created_at=0.0,
    )


def report(engine_id: str, version: int) -> WeightUpdateReport:
    return WeightUpdateReport(
        engine_id=engine_id, version=version, published_at=1.0, swap_started_at=3.0, bytes=5
    )


@pytest.fixture(params=["process", pytest.param("ray", marks=pytest.mark.ray)])
def make(request) -> Callable:
    """Return a context manager that yields a broadcaster, to be used inside a running loop."""
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")

    @asynccontextmanager
    async def build(fraction: float, engines: int, **options: float) -> AsyncIterator:
        if request.param == "process":
            yield Broadcaster(fraction, engines, **options)
            return
        import ray

        from weight_sync.ray_broadcaster import create_broadcaster

        client = create_broadcaster(fraction, engines, **options)
        yield client
        ray.kill(client.handle)

    return build


async def test_newest_skips_versions_in_between_and_answers_none_at_its_deadline(make) -> None:
    async with make(1.0, 1) as broadcaster:
        assert await broadcaster.newest(-1, 0.02) is None
        for version in (0, 1, 4):
            await broadcaster.announce(manifest(version))
        assert await broadcaster.newest(-1, 5.0) == manifest(4)
        assert (await broadcaster.newest(3, 5.0)).version == 4
        assert await broadcaster.newest(4, 0.02) is None


async def test_an_announcement_wakes_every_waiting_receiver(make) -> None:
    async with make(1.0, 3) as broadcaster:
        waiting = [asyncio.ensure_future(broadcaster.newest(-1, 20.0)) for _ in range(3)]
        await asyncio.sleep(0)  # the calls begin in their order, so before the next
        assert await broadcaster.reports(0) == []
        assert not any(call.done() for call in waiting)
        await broadcaster.announce(manifest(2))
        assert [newest.version for newest in await asyncio.gather(*waiting)] == [2, 2, 2]


async def test_an_older_version_is_refused_and_the_newest_may_move(make) -> None:
    async with make(1.0, 1) as broadcaster:
        await broadcaster.announce(manifest(3))
        with pytest.raises(VersionOrderError, match="version 2 was announced after 3"):
            await broadcaster.announce(manifest(2))
        await broadcaster.announce(manifest(3))
        assert (await broadcaster.newest(2, 5.0)).version == 3


async def test_a_learner_that_was_made_again_begins_with_an_older_version_and_fences_the_one_before(
    make,
) -> None:
    async with make(1.0, 1) as broadcaster:
        await broadcaster.announce(manifest(3))
        if isinstance(broadcaster, Broadcaster):
            await broadcaster.announce(manifest(1), 1)
        else:
            await broadcaster.of_epoch(1).announce(manifest(1))
        assert await broadcaster.newest(1, 0.02) is None
        assert (await broadcaster.newest(0, 5.0)).version == 1
        with pytest.raises(VersionOrderError, match="version 4 was announced by a learner of"):
            await broadcaster.announce(manifest(4))


async def test_a_version_with_another_digest_is_new_to_an_engine_that_serves_it(make) -> None:
    async with make(1.0, 1) as broadcaster:
        await broadcaster.announce(manifest(3))
        assert await broadcaster.newest(3, 0.02, manifest(3).digest) is None
        assert (await broadcaster.newest(3, 5.0, "another")).version == 3
        assert await broadcaster.newest(4, 0.02, "another") is None


@pytest.mark.parametrize("reports", [[report("a", 1)], []], ids=["report", "release"])
async def test_a_permit_goes_to_the_next_with_the_report_or_release_of_its_holder(
    make, reports
) -> None:
    async with make(0.25, 4) as broadcaster:
        await broadcaster.release("a")
        assert await broadcaster.acquire_swap("a", 5.0)
        assert await broadcaster.acquire_swap("a", 5.0)
        waiting = asyncio.ensure_future(broadcaster.acquire_swap("b", 20.0))
        assert not await broadcaster.acquire_swap("c", 0.02)
        assert not waiting.done()
        if reports:
            await broadcaster.report(*reports)
        else:
            await broadcaster.release("a")
        assert await waiting
        assert not await broadcaster.acquire_swap("c", 0.02)
        assert await broadcaster.reports(0) == reports


@given(
    fraction=st.floats(0, 1, exclude_min=True, allow_subnormal=False),
    engines=st.integers(1, 500),
)
def test_at_least_one_and_at_most_the_fraction_may_swap(fraction: float, engines: int) -> None:
    permits = Broadcaster(fraction, engines).permits
    assert permits == max(1, math.floor(fraction * engines))


async def test_other_numbers_of_engines_have_other_numbers_of_permits(make) -> None:
    async with make(0.5, 2) as broadcaster:
        await broadcaster.resize(4)
        assert await broadcaster.acquire_swap("a", 5.0)
        assert await broadcaster.acquire_swap("b", 5.0)
        assert not await broadcaster.acquire_swap("c", 0.02)


@pytest.mark.parametrize(("fraction", "engines"), [(0.0, 1), (1.1, 1), (0.5, 0)])
def test_a_broadcaster_that_could_never_grant_is_refused(fraction: float, engines: int) -> None:
    with pytest.raises(InputError, match="update_fraction is"):
        Broadcaster(fraction, engines)


@pytest.mark.ray
@pytest.mark.slow
async def test_callers_wait_for_a_broadcaster_that_is_restarted(ray_cluster) -> None:
    import ray

    from weight_sync.errors import BroadcasterDied
    from weight_sync.ray_broadcaster import create_broadcaster

    async with asyncio.timeout(60):
        client = create_broadcaster(1.0, 1)
        await client.announce(manifest(2))
        assert await client.acquire_swap("a", 5.0)
        pid = await client.handle.__ray_call__.remote(lambda _: os.getpid())
        dies = asyncio.ensure_future(client.live())
        waits = asyncio.ensure_future(client.newest(2, 60.0))
        await asyncio.sleep(0)
        assert await client.reports(0) == [], "both calls have begun, as they do in their order"
        os.kill(pid, signal.SIGKILL)
        with pytest.raises((ray.exceptions.RayActorError, BroadcasterDied)):
            await dies
        await client.start(again=True)
        assert await client.newest(-1, 0.02) is None, "it has forgotten everything"
        assert await client.acquire_swap("b", 5.0), "permits are void"
        await client.announce(manifest(3))
        assert (await waits).version == 3
        client.stop()
        with pytest.raises(BroadcasterDied):
            await client.newest(3, 30.0)  # which waits, and is not answered before the kill comes


async def test_a_report_that_comes_twice_counts_once() -> None:
    broadcaster = Broadcaster(1.0, 1)
    reports = [report("a", 1), report("a", 2), report("a", 1)]
    for sent in reports:
        await broadcaster.report(sent)
    assert await broadcaster.reports(0) == reports[:2]

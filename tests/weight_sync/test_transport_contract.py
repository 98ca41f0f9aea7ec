"""What every transport promises, run against each implementation."""

import os
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import xxhash

from weight_sync.errors import StagingError
from weight_sync.transport import Transport
from weight_sync.transports.shared_memory import SharedMemoryTransport, map_verified


@pytest.fixture(params=[SharedMemoryTransport])
def transport(request) -> Iterator[Transport]:
    transport = request.param()
    yield transport
    transport.close()


def pieces(*parts: tuple[int, bytes]) -> list[tuple[int, memoryview]]:
    return [(offset, memoryview(data)) for offset, data in parts]


def test_what_was_written_is_read_and_gaps_are_zero(transport: Transport) -> None:
    bucket = transport.write(0, 20, pieces((0, b"abc"), (8, b"defg")))
    whole = b"abc" + bytes(5) + b"defg" + bytes(8)
    assert bucket.nbytes == 20
    assert bucket.checksum == xxhash.xxh3_128_hexdigest(whole)
    staged = transport.open(bucket)
    assert bytes(staged.memory) == whole
    staged.close()


def test_a_large_bucket_survives_the_trip(transport: Transport) -> None:
    data = random.Random(0).randbytes(5_000_001)
    staged = transport.open(transport.write(3, len(data), pieces((0, data))))
    assert bytes(staged.memory) == data
    staged.close()


def test_a_staged_bucket_outlives_its_version_and_its_publisher(transport: Transport) -> None:
    bucket = transport.write(0, 3, pieces((0, b"abc")))
    staged = transport.open(bucket)
    transport.retire(before=1)
    with pytest.raises(StagingError):
        transport.open(bucket)
    again = transport.open(staged.bucket)
    transport.close()
    assert (bytes(staged.memory), bytes(again.memory)) == (b"abc", b"abc")
    view = again.memory
    again.close()
    staged.close()
    assert bytes(view) == b"abc"


def test_retire_keeps_the_version_it_names_and_newer_ones(transport: Transport) -> None:
    buckets = [transport.write(v, 1, pieces((0, bytes([v])))) for v in (4, 5, 6)]
    transport.retire(before=5)
    with pytest.raises(StagingError):
        transport.open(buckets[0])
    for version in (5, 6):
        staged = transport.open(buckets[version - 4])
        assert bytes(staged.memory) == bytes([version])
        staged.close()


def test_writing_to_staged_memory_changes_nobody_elses(transport: Transport) -> None:
    bucket = transport.write(0, 3, pieces((0, b"abc")))
    one, two = transport.open(bucket), transport.open(bucket)
    one.memory[0] = ord("z")
    assert (bytes(one.memory), bytes(two.memory)) == (b"zbc", b"abc")
    one.close()
    two.close()


@pytest.mark.parametrize(
    "changes", [{"checksum": "0" * 32}, {"nbytes": 2}, {"nbytes": 4}, {"location": "nowhere"}]
)
def test_a_bucket_that_is_not_the_promised_one_is_refused(
    transport: Transport, changes: dict
) -> None:
    bucket = transport.write(0, 3, pieces((0, b"abc")))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StagingError):
        transport.open(replace(bucket, **changes))
    assert len(os.listdir("/proc/self/fd")) == before


def test_closing_gives_every_descriptor_back(transport: Transport) -> None:
    before = len(os.listdir("/proc/self/fd"))
    staged = [transport.open(transport.write(v, 9, [])) for v in range(5)]
    for held in staged:
        held.close()
        held.close()
    transport.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_shared_memory_that_could_still_change_is_refused(tmp_path) -> None:
    transport = SharedMemoryTransport()
    sealed = transport.write(0, 3, pieces((0, b"abc")))
    descriptor = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.write(descriptor, b"abc")
    location = f"/proc/{os.getpid()}/fd/{descriptor}"
    for opener in (transport.open, map_verified):
        with pytest.raises(StagingError, match="not sealed"):
            opener(replace(sealed, location=location))
    os.close(descriptor)
    file = tmp_path / "file"
    file.write_bytes(b"abc")
    descriptor = os.open(file, os.O_RDONLY)
    with pytest.raises(StagingError, match="no shared memory"):
        transport.open(replace(sealed, location=f"/proc/{os.getpid()}/fd/{descriptor}"))
    os.close(descriptor)
    transport.close()


def test_published_shared_memory_cannot_be_changed_by_anyone() -> None:
    transport = SharedMemoryTransport()
    bucket = transport.write(0, 3, pieces((0, b"abc")))
    with open(bucket.location, "r+b", buffering=0) as file, pytest.raises(PermissionError):
        file.write(b"xyz")
    transport.close()

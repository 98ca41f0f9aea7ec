"""The contract of transports, run against each implementation."""

import os
import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest
import xxhash

from tests.weight_sync.conftest import open_files
from weight_sync.buckets import Piece
from weight_sync.errors import StagingError
from weight_sync.manifest import Bucket, Manifest, TensorSpec
from weight_sync.transports.filesystem import FilesystemTransport
from weight_sync.transports.protocol import Transport
from weight_sync.transports.sealed_memory import map_verified
from weight_sync.transports.shared_memory import SharedMemoryTransport

PARAMS = ["shared_memory", "filesystem", pytest.param("object_store", marks=pytest.mark.ray)]


@pytest.fixture(params=PARAMS)
def transport(request, tmp_path) -> Iterator[Transport]:
    if request.param == "object_store":
        request.getfixturevalue("ray_cluster")
        from weight_sync.transports.ray_object_store import ObjectStoreTransport

        transport: Transport = ObjectStoreTransport()
    elif request.param == "filesystem":
        transport = FilesystemTransport(tmp_path / "weights")
    else:
        transport = SharedMemoryTransport()
    yield transport
    transport.close()


def pieces(*parts: tuple[int, bytes]) -> list[Piece]:
    return [Piece(offset, memoryview(data)) for offset, data in parts]


def content(transport: Transport, bucket: Bucket) -> bytes:
    """Return the bytes of a bucket as a receiver gets them."""
    with closing(transport.open(bucket)) as staged:
        return bytes(staged.memory)


def manifest_of(version: int, bucket: Bucket) -> Manifest:
    """Return a version that consists of one float in a bucket."""
    spec = TensorSpec(name="a", dtype="float32", shape=(), bucket=0, offset=0)
    return Manifest(version=version, tensors=(spec,), buckets=(bucket,), created_at=version)


def test_what_was_written_is_read_and_gaps_are_zero(transport: Transport) -> None:
    bucket = transport.write(0, 20, pieces((0, b"abc"), (8, b"defg")))
    whole = b"abc" + bytes(5) + b"defg" + bytes(8)
    assert bucket.nbytes == 20
    assert bucket.checksum == xxhash.xxh3_128_hexdigest(whole)
    assert content(transport, bucket) == whole


def test_a_large_bucket_survives_the_trip(transport: Transport) -> None:
    data = random.Random(0).randbytes(5_000_001)
    assert content(transport, transport.write(3, len(data), pieces((0, data)))) == data


def test_named_tensors_arrive_like_nameless_bytes(transport: Transport) -> None:
    names = [("b", "bfloat16", (3,), 0, b"abcdef"), ("a", "float32", (), 64, b"ghij")]
    parts = []
    for name, dtype, shape, offset, data in names:
        spec = TensorSpec(name=name, dtype=dtype, shape=shape, bucket=0, offset=offset)
        parts.append(Piece(offset, memoryview(data), spec))
    assert content(transport, transport.write(0, 68, parts)) == b"abcdef" + bytes(58) + b"ghij"


def test_a_staged_bucket_outlives_its_version_and_its_publisher(transport: Transport) -> None:
    bucket = transport.write(0, 4, pieces((0, b"abcd")))
    staged = transport.open(bucket)
    transport.commit(manifest_of(1, transport.write(1, 4, pieces((0, b"efgh")))))
    again = transport.open(staged.bucket)
    transport.close()
    assert (bytes(staged.memory), bytes(again.memory)) == (b"abcd", b"abcd")
    view = again.memory
    again.close()
    staged.close()
    assert bytes(view) == b"abcd"


def test_a_staged_bucket_can_be_mapped_by_another_process_of_the_node(transport: Transport) -> None:
    staged = transport.open(transport.write(0, 4, pieces((0, b"abcd"))))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, bytes(map_verified(staged.bucket)))
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 4) == b"abcd"
    os.close(reader)
    os.close(writer)
    staged.close()


def test_commit_keeps_the_version_it_names_and_newer_ones(transport: Transport) -> None:
    buckets = {v: transport.write(v, 4, pieces((0, bytes([v] * 4)))) for v in (4, 5, 6)}
    transport.commit(manifest_of(5, buckets[5]))
    with pytest.raises(StagingError):
        transport.open(buckets[4])
    for version in (5, 6):
        assert content(transport, buckets[version]) == bytes([version] * 4)
    transport.commit(manifest_of(6, buckets[6]))
    transport.open(buckets[6]).close()
    with pytest.raises(StagingError):
        transport.open(buckets[5])


def test_many_buckets_of_a_version_are_kept_apart(transport: Transport) -> None:
    written = [transport.write(0, 4, pieces((0, bytes([i] * 4)))) for i in range(9)]
    assert len({bucket.location for bucket in written}) == 9
    for number, bucket in enumerate(written):
        assert content(transport, bucket) == bytes([number] * 4)


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
    before = open_files()
    with pytest.raises(StagingError):
        transport.open(replace(bucket, **changes))
    assert open_files() == before


def test_closing_gives_every_descriptor_back(transport: Transport) -> None:
    before = open_files()
    staged = [transport.open(transport.write(v, 9, pieces())) for v in range(5)]
    for bucket in staged:
        bucket.close()
        bucket.close()
    transport.close()
    assert open_files() == before


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

"""Publishing copies first, announces last, and never goes backwards."""

import itertools
import threading
from collections.abc import Iterator

import pytest
import torch

from tests.waiting import until
from tests.weight_sync.checksum import checksum
from tests.weight_sync.conftest import Sender, make_weights, open_files, same
from weight_sync.errors import ManifestError, PublishFailed, StagingError, VersionOrderError
from weight_sync.manifest import Bucket, Manifest
from weight_sync.publish.staged_publisher import StagedPublisher
from weight_sync.receive.staging import stage
from weight_sync.transports.shared_memory import SharedMemoryTransport


@pytest.fixture
def publisher(transport) -> Iterator[Sender]:
    with Sender(transport) as publisher:
        yield publisher


class GatedTransport(SharedMemoryTransport):
    """Blocks every write until the test allows it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.may_write = threading.Semaphore(0), threading.Semaphore(0)

    def write(self, version, nbytes, pieces) -> Bucket:
        self.asked.release()
        assert self.may_write.acquire(timeout=30)
        return super().write(version, nbytes, pieces)


BASE = torch.arange(24.0).reshape(4, 6)
ARRIVING = {
    "float32": (make_weights(0), None),
    "bfloat16": (make_weights(0, torch.bfloat16), None),
    "float16": (make_weights(0, torch.float16), None),
    "float64": (make_weights(0, torch.float64), None),
    "cast to the type of the wire": (make_weights(0), torch.bfloat16),
    "not contiguous": ({"t": BASE.T, "s": BASE[:, ::2], "p": torch.nn.Parameter(BASE)}, None),
    "large": ({"l": torch.arange(300_001.0), "last": torch.ones(1)}, None),
}
"""Tensors to publish, and the type of the wire."""


@pytest.mark.parametrize("case", ARRIVING)
def test_tensors_arrive_bit_by_bit_in_their_order_with_their_checksum(transport, case) -> None:
    tensors, wire = ARRIVING[case]
    with Sender(transport, wire_dtype=wire) as publisher:
        digest = publisher.publish(0, tensors.items())
        publisher.flush(30)
        [manifest] = publisher.manifests
        staged = stage(manifest, transport)
    expected = {name: tensor.to(wire or tensor.dtype) for name, tensor in tensors.items()}
    received = dict(staged.tensors())
    staged.close()
    assert digest.result(30) == checksum(expected.items())
    assert list(received) == list(expected)
    assert same(received, expected)
    assert {t.dtype for t in received.values()} == {t.dtype for t in expected.values()}
    assert (len(manifest.buckets) > 1) == (case != "not contiguous")


@pytest.mark.parametrize("version", [4, 3, 0])
def test_versions_only_grow(publisher, weights, version) -> None:
    publisher.send(4, weights(4))
    with pytest.raises(VersionOrderError, match=f"version {version} cannot follow version 4"):
        publisher.publish(version, weights(0).items())
    publisher.send(5, weights(5))
    assert [manifest.version for manifest in publisher.manifests] == [4, 5]


@pytest.mark.parametrize("error", [ConnectionError("nobody there"), TimeoutError("too slow")])
def test_a_failed_announcement_is_raised_at_the_next_call_once(transport, weights, error) -> None:
    versions = itertools.count()

    def announce(manifest: Manifest) -> None:
        if manifest.version == 0:
            raise error

    with StagedPublisher(transport, announce) as publisher:
        with pytest.raises(PublishFailed, match=f"version 0 failed: {error}"):
            until(lambda: not publisher.publish(next(versions), weights(0).items()))
        publisher.publish(next(versions), weights(1).items())
        publisher.flush(30)


def test_an_announcement_may_wait_for_a_broadcaster_that_is_made_again(transport, weights) -> None:
    asked, release = threading.Event(), threading.Event()

    def announce(manifest: Manifest) -> None:
        asked.set()
        release.wait(30)

    with StagedPublisher(transport, announce, timeout=1e-9) as publisher:
        publisher.announce_seconds = 30
        publisher.publish(0, weights(0).items())
        assert asked.wait(30)
        publisher.publish(1, weights(1).items())
        release.set()
        publisher.flush(30)


def test_what_makes_no_manifest_fails_to_be_published(publisher) -> None:
    publisher.publish(0, [("a", torch.ones(1)), ("b", torch.ones(2)), ("a", torch.ones(1))])
    with pytest.raises(PublishFailed, match="'a' occurs twice") as caught:
        publisher.flush(30)
    assert isinstance(caught.value.__cause__, ManifestError)


def test_the_newest_of_the_versions_that_wait_wins_and_the_others_are_counted(weights) -> None:
    seen: list[tuple[int, float]] = []
    transport = GatedTransport()

    def announce(manifest: Manifest) -> None:
        staged = stage(manifest, transport)
        seen.append((manifest.version, float(dict(staged.tensors())["a"])))
        staged.close()

    with StagedPublisher(transport, announce) as publisher:
        publisher.publish(0, [("a", torch.tensor(0.0))])
        assert transport.asked.acquire(timeout=30)
        for version in (1, 2, 3):
            publisher.publish(version, [("a", torch.tensor(float(version)))])
        assert publisher.skipped == 2
        transport.may_write.release(2)
        publisher.flush(30)
    assert seen == [(0, 0.0), (3, 3.0)]


def test_only_the_newest_version_is_kept(publisher, transport, weights) -> None:
    before = len(open_files())
    first, *_, newest = [publisher.send(version, weights(version)) for version in range(4)]
    assert len(open_files()) == before + len(newest.buckets)
    stage(newest, transport).close()
    with pytest.raises(StagingError):  # its descriptors are gone, or belong to a newer version
        stage(first, transport)


def test_the_checksum_of_a_version_is_that_of_its_names_bytes_and_their_order(
    publisher, weights
) -> None:
    tensors = weights(0)
    first = publisher.publish(0, tensors.items()).result(30)
    assert first == checksum(tensors.items())
    renamed = [(f"model.{name}", tensor) for name, tensor in tensors.items()]
    versions = [weights(1).items(), reversed(tensors.items()), renamed, tensors.items()]
    again = [publisher.publish(n, version).result(30) for n, version in enumerate(versions, 1)]
    assert [digest == first for digest in again] == [False, False, False, True]


def test_the_newest_version_can_be_announced_again_and_never_after_a_newer_one(
    transport, weights
) -> None:
    announced: list[int] = []

    async def announce(manifest: Manifest) -> None:
        if announced and manifest.version < announced[-1]:
            raise VersionOrderError("older")
        announced.append(manifest.version)

    with StagedPublisher(transport, announce) as publisher:
        publisher.announce_again()
        for version in (0, 1):
            publisher.publish(version, weights(version).items())
            publisher.flush(30)
        publisher.announce_again()
        announced.append(9)
        publisher.announce_again()
    assert announced == [0, 1, 1, 9]

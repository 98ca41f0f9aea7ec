"""A snapshot of tensors on a GPU, there or in few blocks of host memory, and its checksum.

The device is a fake: its tensors lie in host memory, and a copy happens when something waits for it
or, in the order of the stream, for a later one.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch
import xxhash
from torch import Tensor

from tests.weight_sync.checksum import checksum
from tests.weight_sync.conftest import same
from weight_sync.adapter import KEPT
from weight_sync.manifest import Manifest
from weight_sync.publish import snapshot as snapshot_module
from weight_sync.publish.snapshot import PIECE_ELEMENTS, Gpu, Snapshot, bytes_of
from weight_sync.publish.staged_publisher import StagedPublisher


class FakeGpu(Gpu):
    """A stream of copies, which are done in their order once somebody waits."""

    def __init__(self) -> None:
        self.registered: list[int] = []
        self._stream: list[Callable[[], object]] = []
        self._lock = threading.Lock()

    def holds(self, tensor: Tensor) -> bool:
        return True

    def register(self, memory: Tensor) -> None:
        self.registered.append(memory.nbytes)

    def read(self, tensor: Tensor) -> Iterator[memoryview]:
        data = bytes_of(tensor)
        return (data[begin : begin + 100] for begin in range(0, len(data), 100))

    def copy(self, tensor: Tensor, host: Tensor) -> Callable[[], object]:
        self._stream.append(lambda: host.copy_(tensor))
        position = len(self._stream)

        def wait() -> None:
            with self._lock, torch.no_grad():
                for number in range(position):
                    self._stream[number]()
                    self._stream[number] = lambda: None

        return wait


@pytest.fixture
def gpu(monkeypatch) -> FakeGpu:
    monkeypatch.setattr(snapshot_module, "BLOCK_BYTES", 2048)
    return FakeGpu()


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_everything_arrives_before_it_is_sent_and_the_checksum_is_the_same(
    gpu, weights, dtype, on_device
) -> None:
    taken, wire = Snapshot(gpu, on_device=on_device), dtype or torch.float32
    for version in range(3):
        tensors, router = weights(version), torch.randn(8)
        expected = {name: tensor.to(wire, copy=True) for name, tensor in tensors.items()}
        tensors[f"gate.{KEPT}"], expected[f"gate.{KEPT}"] = router, router.clone()
        digest = taken.take(tensors.items(), dtype)
        for tensor in tensors.values():
            tensor.zero_()
        assert same(taken.tensors, expected)
        assert all(host.is_contiguous() for _, host in taken.tensors)
        assert digest.result() == checksum(expected.items())


def test_a_copy_on_a_gpu_is_read_through_two_pinned_chunks_each_whole_before_the_next(
    monkeypatch,
) -> None:
    """The device copies when its stream is waited for."""
    monkeypatch.setattr(snapshot_module, "CHUNK_BYTES", 64)
    chunks: list[Tensor] = []

    class Pinning(Gpu):
        def pinned(self, nbytes: int) -> Tensor:
            chunks.append(torch.zeros(nbytes, dtype=torch.uint8))
            return chunks[-1]

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Mock())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    gpu = Pinning()
    for numel in (0, 1, 16, 17, 100):
        tensor = torch.randn(numel).to(torch.bfloat16)
        assert b"".join(bytes(part) for part in gpu.read(tensor)) == bytes(bytes_of(tensor))
    assert len(chunks) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_device_casts_before_it_copies(monkeypatch, dtype) -> None:
    copied, tensor = [], torch.tensor([1.0, 2.5])

    class Host:
        def __init__(self) -> None:
            self.dtype = dtype

        def copy_(self, source: Tensor, *, non_blocking: bool) -> None:
            assert non_blocking
            copied.append(source)

    monkeypatch.setattr(torch.cuda, "Event", Mock)
    Gpu().copy(tensor, Host())()
    [source] = copied
    assert torch.equal(source, tensor.to(dtype))
    assert (source is tensor) == (dtype == torch.float32)


def test_copies_without_a_checksum_have_the_values_of_tensors_of_every_size() -> None:
    sizes = (0, 1, PIECE_ELEMENTS, PIECE_ELEMENTS + 1)
    tensors = [(str(size), torch.arange(size, dtype=torch.float32)) for size in sizes]
    tensors += [("0-dim", torch.tensor(7.0)), ("turned", torch.arange(6.0).view(2, 3).T)]
    snapshot = Snapshot()
    for _ in range(2):  # the second time to the same memory
        snapshot.take(iter(tensors), None, checksummed=False)
        for (name, tensor), (copied, host) in zip(tensors, snapshot.tensors, strict=True):
            assert name == copied
            assert torch.equal(tensor, host)
            tensor.add_(1.0)


def test_blocks_are_of_the_size_that_is_needed_and_used_again(gpu) -> None:
    tensors = [("large", torch.ones(3000)), *((f"t{n}", torch.ones(129)) for n in range(9))]
    taken = Snapshot(gpu)
    for _ in range(3):
        taken.take(tensors, None).result()
    addresses = [host.data_ptr() for _, host in taken.tensors]
    assert all(address % 64 == 0 for address in addresses)
    assert len(set(addresses)) == len(tensors)
    per_block = 2048 // 576
    assert gpu.registered == [12000, *[2048] * -(-9 // per_block)]


class SlowDigest:
    """A checksum that waits until the test lets it go on, or fails."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.go_on, self.failure = threading.Event(), failure
        self._digest = xxhash.xxh3_64()
        self.hexdigest = self._digest.hexdigest

    def update(self, part: memoryview | bytes) -> None:
        assert self.go_on.wait(30)
        if self.failure is not None and len(part) == 28:  # one in the midst
            raise self.failure
        self._digest.update(part)


def test_versions_are_published_and_announced_before_a_slow_checksum_which_no_other_version_changes(
    transport, weights, monkeypatch
) -> None:
    slow = [SlowDigest() for _ in range(3)]
    made = iter(slow)
    monkeypatch.setattr(snapshot_module.xxhash, "xxh3_64", lambda: next(made))
    announced: list[int] = []
    first_sent, second_copied = threading.Event(), threading.Event()

    def announce(manifest: Manifest) -> None:
        first_sent.set()  # before this, the second takes its place and its memory
        assert second_copied.wait(30)  # after this, its memory is free
        announced.append(manifest.version)

    with StagedPublisher(transport, announce) as publisher:
        digests = [publisher.publish(0, weights(0).items())]
        assert first_sent.wait(30)
        digests.append(publisher.publish(1, weights(1).items()))
        second_copied.set()
        publisher.flush(30)
        assert announced[-1] == 1
        assert not any(digest.done() for digest in digests)
        # the third is copied to the memory of the first, once that is read
        threading.Timer(0.1, lambda: [digest.go_on.set() for digest in slow]).start()
        digests.append(publisher.publish(2, weights(2).items()))
        sums = [digest.result(30) for digest in digests]
    monkeypatch.undo()
    assert sums == [checksum(weights(version).items()) for version in range(3)]


def test_a_checksum_that_fails_fails_its_version_and_the_next_in_its_memory(
    weights, monkeypatch
) -> None:
    broken = SlowDigest(OSError("a bad page"))
    broken.go_on.set()
    monkeypatch.setattr(snapshot_module.xxhash, "xxh3_64", lambda: broken)
    taken = Snapshot()
    with pytest.raises(OSError, match="a bad page"):
        taken.take(weights(0).items(), None).result(30)
    with pytest.raises(OSError, match="a bad page"):
        taken.take(weights(1).items(), None)

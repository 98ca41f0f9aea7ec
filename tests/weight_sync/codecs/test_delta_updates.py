"""Updates by delta leave an engine with the very bits of the whole version, or come whole."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.weight_sync.conftest import Sender, same
from weight_sync.errors import StagingError, WrongBase
from weight_sync.receive.staging import stage, stage_delta
from weight_sync.transports.shared_memory import SharedMemoryTransport


def steps(count: int, share: float = 0.02, dtype: torch.dtype = torch.bfloat16) -> list[dict]:
    """Weights of consecutive versions; from one to the next about `share` of them change."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"embed": (311, 7), "scale": (), "norm": (7,), "head": (3, 31, 50)}
    now = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    versions = []
    for _ in range(count):
        versions.append({name: tensor.to(dtype) for name, tensor in now.items()})
        now = {
            name: torch.where(torch.rand(t.shape, generator=generator) < share, t + 1, t)
            for name, t in now.items()
        }
    return versions


@pytest.fixture
def send(transport):
    """Return a function that publishes a version by codec `delta` and returns its manifest."""
    return Sender(transport, 8192, codec="delta").send


async def test_ten_updates_by_delta_end_in_the_bits_of_the_whole_version(
    engine, send, receiver_of
) -> None:
    receiver, reports = receiver_of(keep_base=True), []
    for version, weights in enumerate(steps(10)):
        reports.append(await receiver.update(send(version, weights)))
        assert same(engine.weights, weights)
    receiver.close()
    first, *others = reports
    assert (first.codec, first.bytes, first.changed) == ("full", first.full_bytes, None)
    for report in others:
        assert report.codec == "delta"
        assert 0 < report.bytes < 0.2 * report.full_bytes
        assert 0.01 < report.changed < 0.03


@pytest.mark.parametrize(
    ("keep_base", "taken"),
    [
        (False, [(0, "full"), (1, "full"), (2, "full"), (3, "full")]),
        (True, [(0, "full"), (2, "full"), (3, "delta")]),
    ],
)
async def test_a_receiver_without_a_base_or_that_missed_a_version_gets_the_next_one_whole(
    engine, send, receiver_of, keep_base, taken
) -> None:
    receiver, reports = receiver_of(keep_base=keep_base), []
    for version, weights in enumerate(steps(4)):
        manifest = send(version, weights)
        if version in dict(taken):
            reports.append(await receiver.update(manifest))
    receiver.close()
    assert [(report.version, report.codec) for report in reports] == taken
    assert same(engine.weights, weights)


def test_a_delta_on_another_version_is_refused(transport, send) -> None:
    versions = steps(3)
    old = stage(send(0, versions[0]), transport)
    send(1, versions[1])
    third = send(2, versions[2])
    with pytest.raises(WrongBase, match="applies to a bucket with checksum"):
        stage_delta(third, transport, old)
    assert same(stage(third, transport, old).tensors(), versions[2])


def test_a_base_of_the_same_number_but_other_bits_is_refused(transport, send) -> None:
    """After a rollback a version number may be used again for weights that differ in a bit."""
    versions = steps(2)
    other = {name: tensor.clone() for name, tensor in versions[0].items()}
    other["embed"][5, 5] += 1
    with Sender(SharedMemoryTransport(), 8192) as before:
        base = stage(before.send(0, other), SharedMemoryTransport())
    send(0, versions[0])
    second = send(1, versions[1])
    with pytest.raises(WrongBase):
        stage_delta(second, transport, base)
    assert same(stage(second, transport, base).tensors(), versions[1])


@pytest.mark.parametrize("fault", ["lost patch", "patch of another bucket", "wrong result"])
def test_a_faulty_delta_is_refused_and_the_version_comes_whole(transport, send, fault) -> None:
    versions = steps(2)
    base = stage(send(0, versions[0]), transport)
    good = send(1, versions[1])
    first, second, *rest = good.delta.buckets
    if fault == "wrong result":
        changed = replace(good.buckets[0], checksum="0" * 32)
        broken = replace(good, buckets=(changed, *good.buckets[1:]))
    else:
        lost = replace(first, location=first.location + "9"), second
        patches = lost if fault == "lost patch" else (second, first)
        broken = replace(good, delta=replace(good.delta, buckets=(*patches, *rest)))
    with pytest.raises(StagingError):
        stage_delta(broken, transport, base)
    if fault != "wrong result":
        assert same(stage(broken, transport, base).tensors(), versions[1])


def test_nothing_is_offered_where_it_would_not_pay(send) -> None:
    versions = steps(2, share=0.9)
    manifests = [send(version, weights) for version, weights in enumerate(versions)]
    assert manifests[1].delta is None
    assert manifests[1].changed > 0.8


def test_other_tensors_begin_a_new_chain(send) -> None:
    (first,) = steps(1)
    send(0, first)
    assert send(1, first | {"bias": torch.zeros(3, dtype=torch.bfloat16)}).delta is None
    (again,) = steps(1, dtype=torch.float32)
    assert send(2, again).delta is None
    third = send(3, again)
    assert (third.delta.base_version, third.changed) == (2, 0.0)


def test_the_base_of_a_version_is_the_last_one_sent_whatever_its_number(send) -> None:
    manifests = [send(version, steps(1)[0]) for version in (0, 3, 8)]
    assert [m.delta and m.delta.base_version for m in manifests] == [None, 0, 3]


@given(
    st.lists(st.sampled_from(["float32", "bfloat16", "float64"]), min_size=1, max_size=4),
    st.integers(64, 600).map(lambda n: 64 * n),
    st.floats(0.0, 0.4),
)
def test_any_mixture_of_dtypes_and_buckets_is_rebuilt_bit_by_bit(dtypes, size, share) -> None:
    generator = torch.Generator().manual_seed(len(dtypes))
    one = {
        f"t{i}": torch.randn(57 * (i + 1), 3, generator=generator).to(getattr(torch, dtype))
        for i, dtype in enumerate(dtypes)
    }
    two = {
        name: torch.where(torch.rand(t.shape, generator=generator) < share, t * 1.5, t)
        for name, t in one.items()
    }
    transport = SharedMemoryTransport()
    with Sender(transport, size, codec="delta") as publisher:
        base = stage(publisher.send(0, one), transport)
        staged = stage_delta(publisher.send(1, two), transport, base)
        assert same(staged.tensors(), two)
        staged.close()
        base.close()

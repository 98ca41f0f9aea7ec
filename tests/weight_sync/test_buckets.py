"""The bucket plan, by table and by property."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weight_sync.buckets import ALIGNMENT, plan_buckets
from weight_sync.errors import ManifestError
from weight_sync.manifest import ITEM_BYTES, Bucket, Manifest


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([("a", "float32", (0,))], "sizes above 0"),
        ([("a", "complex64", (1,))], "allowed are float32"),
    ],
)
def test_what_cannot_be_planned_is_refused(tensors: list, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        plan_buckets(tensors, 256)


@given(
    shapes=st.lists(
        st.tuples(
            st.sampled_from(sorted(ITEM_BYTES)),
            st.lists(st.integers(1, 40), max_size=3).map(tuple),
        ),
        min_size=1,
        max_size=30,
    ),
    bucket_bytes=st.integers(64, 5000),
)
def test_a_plan_holds_every_tensor_once_aligned_and_within_bounds(
    shapes: list, bucket_bytes: int
) -> None:
    tensors = [(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(shapes)]
    plan = plan_buckets(tensors, bucket_bytes)
    assert [(spec.name, spec.dtype, spec.shape) for spec in plan.tensors] == tensors
    assert all(spec.offset % ALIGNMENT == 0 for spec in plan.tensors)
    members = [[s for s in plan.tensors if s.bucket == b] for b in range(len(plan.sizes))]
    for size, inside in zip(plan.sizes, members, strict=True):
        assert inside
        assert size <= bucket_bytes or len(inside) == 1
        assert size == inside[-1].offset + inside[-1].nbytes
    # Greedy: the first tensor of a bucket would not have fitted into the one before it.
    for before, (first, *_) in zip(plan.sizes, members[1:], strict=False):
        assert -(-before // ALIGNMENT) * ALIGNMENT + first.nbytes > bucket_bytes
    buckets = tuple(Bucket(nbytes=n, checksum="0" * 32, location="") for n in plan.sizes)
    manifest = Manifest(version=0, tensors=plan.tensors, buckets=buckets, created_at=0.0)
    assert Manifest.from_json(manifest.to_json()) == manifest

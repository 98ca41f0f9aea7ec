"""A patch turns its base into the new bucket bit by bit and is refused on any other base."""

from itertools import product

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from weight_sync.buckets import Piece
from weight_sync.codecs.delta import MOST_CHANGED, Patch, diff, patched
from weight_sync.errors import StagingError, WrongBase


def checksum(array: np.ndarray) -> str:
    return xxhash.xxh3_128_hexdigest(array.data)


def whole(array: np.ndarray) -> list[Piece]:
    return [Piece(0, memoryview(array))]


def patch_of(base: np.ndarray, new: np.ndarray, item_bytes: int = 2) -> Patch:
    return diff(base, whole(new), item_bytes, base_checksum=checksum(base))


@st.composite
def neighbours(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    """Draw a bucket, another with at most half of its elements changed, and bytes of an element."""
    item = draw(st.sampled_from([2, 4, 8]))
    count = draw(st.integers(1, 300))
    chance = np.random.default_rng(draw(st.integers(0, 2**32)))
    base = chance.integers(0, 256, count * item, dtype=np.uint8)
    new = base.copy().reshape(count, item)
    indices = chance.choice(count, size=draw(st.integers(0, count // 2)), replace=False)
    new[indices, draw(st.integers(0, item - 1))] ^= draw(st.integers(1, 255))
    return base, new.reshape(-1), item


@given(neighbours())
def test_a_patched_base_is_the_new_bucket_bit_by_bit(case) -> None:
    base, new, item = case
    patch = patch_of(base, new, item)
    before = base.copy()
    assert np.array_equal(patched(base, checksum(base), memoryview(patch.payload)), new)
    assert np.array_equal(base, before)
    assert patch.elements == base.size // item
    assert patch.changed == (base.reshape(-1, item) != new.reshape(-1, item)).any(axis=1).sum()


@given(neighbours(), st.data())
def test_a_patch_is_refused_on_any_other_base(case, data) -> None:
    base, new, item = case
    other = base.copy()
    other[data.draw(st.integers(0, base.size - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(WrongBase, match=checksum(base)):
        patched(other, checksum(other), memoryview(patch_of(base, new, item).payload))


def test_no_single_damaged_byte_does_more_harm_than_an_error() -> None:
    base = np.arange(2000, dtype=np.uint16).view(np.uint8)
    new = base.copy()
    new[::100] += 1
    sound = patch_of(base, new, 2).payload
    for index, flip in product(range(len(sound)), range(1, 256)):
        payload = bytearray(sound)
        payload[index] ^= flip
        try:
            result = patched(base, checksum(base), memoryview(payload))
        except StagingError:
            continue
        assert result.size == new.size


@given(neighbours(), st.data())
def test_a_truncated_patch_is_refused(case, data) -> None:
    base, new, item = case
    payload = patch_of(base, new, item).payload
    with pytest.raises(StagingError):
        patched(base, checksum(base), memoryview(payload[: data.draw(st.integers(0, 60))]))


def test_a_patch_for_a_bucket_of_another_size_is_refused() -> None:
    base = np.zeros(16, np.uint8)
    payload = memoryview(patch_of(base, base.copy()).payload)
    with pytest.raises(StagingError, match="16 bytes, not of 18"):
        patched(np.zeros(18, np.uint8), checksum(base), payload)


def test_gaps_between_pieces_stay_and_indices_count_from_the_bucket() -> None:
    base = np.zeros(128, np.uint8)
    one, two = np.zeros(6, np.uint8), np.zeros(4, np.uint8)
    two[2] = 7
    pieces = [Piece(0, memoryview(one)), Piece(64, memoryview(two))]
    patch = diff(base, pieces, 2, base_checksum=checksum(base))
    assert (patch.changed, patch.elements) == (1, 5)
    result = patched(base, checksum(base), memoryview(patch.payload))
    assert np.flatnonzero(result).tolist() == [66]


def test_far_apart_changes_keep_their_indices() -> None:
    base = np.zeros(2 * 200_000, np.uint8)
    new = base.copy()
    new[[2, 2 * 199_999]] = 1
    result = patched(base, checksum(base), memoryview(patch_of(base, new).payload))
    assert np.array_equal(result, new)


def test_nothing_is_encoded_where_most_elements_changed() -> None:
    base = np.zeros(200, np.uint8)
    patch = patch_of(base, np.ones(200, np.uint8))
    assert (patch.payload, patch.changed, patch.elements) == (None, 100, 100)
    assert patch.changed > MOST_CHANGED * patch.elements


def test_a_small_step_in_bfloat16_travels_in_a_fraction_of_its_bytes() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(1_000_000, generator=generator) * 0.02
    step = 1e-6 * torch.sign(torch.randn(1_000_000, generator=generator))
    base, new = (
        tensor.to(torch.bfloat16).view(torch.uint8).numpy() for tensor in (weights, weights + step)
    )
    patch = patch_of(base, new)
    assert 0.01 < patch.changed / patch.elements < 0.2
    assert len(patch.payload) < 0.15 * base.size
    assert np.array_equal(patched(base, checksum(base), memoryview(patch.payload)), new)

"""A manifest is accepted only if it agrees with itself and with the engine."""

from dataclasses import replace

import pytest

from weight_sync.errors import IncompatibleWeights, ManifestError
from weight_sync.manifest import Bucket, Delta, Manifest, TensorSpec, check_signature

A = TensorSpec(name="a", dtype="float32", shape=(2, 3), bucket=0, offset=0)
B = TensorSpec(name="b", dtype="bfloat16", shape=(), bucket=0, offset=64)
BUCKET = Bucket(nbytes=66, checksum="0" * 32, location="/proc/1/fd/3")
GOOD = Manifest(version=7, tensors=(A, B), buckets=(BUCKET,), created_at=12.5)


def test_json_round_trip_is_the_identity() -> None:
    assert Manifest.from_json(GOOD.to_json()) == GOOD
    assert "\n" not in GOOD.to_json()
    assert GOOD.nbytes == 66
    with_delta = replace(GOOD, delta=Delta(base_version=6, buckets=(BUCKET,)), changed=0.25)
    assert Manifest.from_json(with_delta.to_json()) == with_delta


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": -1}, "version is -1"),
        ({"delta": Delta(base_version=7, buckets=(BUCKET,))}, "version 7 has a delta on version 7"),
        ({"delta": Delta(base_version=-1, buckets=(BUCKET,))}, "a delta on version -1"),
        ({"delta": Delta(base_version=6, buckets=())}, "0 patches for 1 buckets"),
        ({"tensors": ()}, "no tensors"),
        ({"tensors": (A, A)}, "'a' occurs twice"),
        ({"tensors": (replace(A, dtype="int7"), B)}, "dtype 'int7'; allowed are float32"),
        ({"tensors": (replace(A, shape=(0, 3)), B)}, "sizes above 0"),
        ({"tensors": (replace(A, shape=(-2, -3)), B)}, "sizes above 0"),
        ({"tensors": (replace(A, bucket=1), B)}, "bucket 1 of 1"),
        ({"tensors": (replace(A, offset=-4), B)}, "starts at byte -4"),
        ({"tensors": (A, replace(B, offset=20))}, "'b' starts at byte 20 .* ends at 24"),
        ({"tensors": (A, replace(B, offset=66))}, "ends at byte 68 .* has 66"),
        ({"buckets": (replace(BUCKET, nbytes=0),)}, "bucket 0 has 0 bytes"),
        ({"buckets": (replace(BUCKET, checksum="xyz"),)}, "32 hexadecimal digits"),
    ],
)
def test_contradictions_are_refused_and_named(changes: dict, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        replace(GOOD, **changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [*((text, "not a manifest") for text in ("", "[]", "{}", "null", GOOD.to_json()[:-9])),
     (GOOD.to_json().replace('"version"', '"verzion"'), "verzion"),
     (GOOD.to_json().replace('"offset":64', '"offset":"x"'), "offset"),
     ('{"surprise":1,' + GOOD.to_json()[1:], "surprise")],
)  # fmt: skip
def test_what_is_not_a_manifest_is_refused(text: str, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        Manifest.from_json(text)


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        ({"a": (None, (2, 3))}, r"1 tensors that the engine does not know \(b\)"),
        (GOOD.signature | {"c": (None, (1,))}, r"lacks 1 that it needs \(c\)"),
        (GOOD.signature | {"a": (None, (3, 2))}, r"'a' of version 7 is float32 \(2, 3\)"),
        (GOOD.signature | {"b": ("float32", ())}, "'b' of version 7 is bfloat16"),
    ],
)
def test_weights_of_another_model_are_refused(expected: dict, message: str) -> None:
    check_signature(GOOD, GOOD.signature)
    check_signature(GOOD, {"a": (None, (2, 3)), "b": (None, ())})
    with pytest.raises(IncompatibleWeights, match=message):
        check_signature(GOOD, expected)

"""The manifest of one version of the weights: its tensors, buckets and checksums.

The publisher writes it last, so that its holder can verify all bytes before touching an engine.
Imports no torch.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pydantic import ConfigDict, TypeAdapter, ValidationError

from weight_sync.adapter import AdapterForm, changed_shapes
from weight_sync.errors import IncompatibleWeights, ManifestError

ITEM_BYTES: Mapping[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}
"""Bytes per element of every dtype that can be sent, by torch's name of the dtype."""

Signature = Mapping[str, tuple[str | None, tuple[int, ...]]]
"""Dtype (None: any) and shape of every tensor of a model, by name."""

_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """The location of one row-major tensor inside a bucket."""

    __pydantic_config__ = _STRICT

    name: str
    """Name in the model folder that transformers loads."""
    dtype: str
    """A key of `ITEM_BYTES`."""
    shape: tuple[int, ...]
    bucket: int
    """Index into the manifest's buckets."""
    offset: int
    """First byte inside the bucket."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return tensor_bytes(self.name, self.dtype, self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A block of memory that holds whole tensors."""

    __pydantic_config__ = _STRICT

    nbytes: int
    checksum: str
    """xxh3_128 of all bytes, padding included, as 32 hexadecimal digits."""
    location: str
    """Address in the format of the transport that stored the bucket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """Patches that turn an earlier version into this one."""

    __pydantic_config__ = _STRICT

    base_version: int
    """The version whose buckets are patched; each patch names the checksum of its base."""
    buckets: tuple[Bucket, ...]
    """One patch (`codecs.delta`) per bucket of the version, in the same order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """All tensors of one policy version and the locations of their bytes.

    Fields that contradict each other raise ManifestError at construction.
    """

    __pydantic_config__ = _STRICT

    version: int
    """Policy version, from 0."""
    tensors: tuple[TensorSpec, ...]
    buckets: tuple[Bucket, ...]
    created_at: float
    """Epoch seconds of the call of `publish`."""
    delta: Delta | None = None
    """None with codec `full`, for a first version, or if a delta would not be smaller."""
    changed: float | None = None
    """Share of elements that differ from the previous version, in [0, 1]; None if not compared."""
    adapter: AdapterForm | None = None
    """The form of an adapter whose factors the tensors are; None: they are all weights."""

    def __post_init__(self) -> None:
        if self.version < 0:
            raise ManifestError(f"version is {self.version}; policy versions start at 0")
        if not self.tensors:
            raise ManifestError(f"version {self.version} has no tensors")
        _check_buckets(self.buckets)
        _check_tensors(self.tensors, self.buckets)
        _ = self.signature  # refuses what is no factor of an adapter
        if self.delta is not None:
            patches, base = self.delta.buckets, self.delta.base_version
            _check_buckets(patches)
            if not 0 <= base < self.version:
                raise ManifestError(f"version {self.version} has a delta on version {base}")
            if (count := len(patches)) != len(self.buckets):
                raise ManifestError(f"a delta has {count} patches for {len(self.buckets)} buckets")

    @property
    def nbytes(self) -> int:
        """Bytes of all buckets of the whole version, padding included."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def digest(self) -> str:
        """Digest of all bytes; weights that were cut into the same buckets have the same."""
        checksums = "".join(bucket.checksum for bucket in self.buckets)
        return hashlib.sha256(checksums.encode()).hexdigest()

    @property
    def signature(self) -> Signature:
        """Dtype and shape of every weight that it changes, by name."""
        if self.adapter is None:
            return {spec.name: (spec.dtype, spec.shape) for spec in self.tensors}
        shapes = changed_shapes({spec.name: spec.shape for spec in self.tensors})
        return {name: (None, shape) for name, shape in shapes.items()}

    def to_json(self) -> str:
        """Return one line of JSON."""
        return _ADAPTER.dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Parse the output of `to_json`; ManifestError for any other text."""
        try:
            return _ADAPTER.validate_json(text)
        except ValidationError as error:
            raise ManifestError(f"not a manifest: {text[:80]!r}: {error}") from error


_ADAPTER = TypeAdapter(Manifest)


def _check_buckets(buckets: Iterable[Bucket]) -> None:
    for index, bucket in enumerate(buckets):
        if bucket.nbytes <= 0:
            raise ManifestError(f"bucket {index} has {bucket.nbytes} bytes; expected more than 0")
        if len(bucket.checksum) != 32 or set(bucket.checksum) - set("0123456789abcdef"):
            raise ManifestError(
                f"bucket {index} has checksum {bucket.checksum!r}; expected 32 hexadecimal digits"
            )


def _check_tensors(tensors: Iterable[TensorSpec], buckets: tuple[Bucket, ...]) -> None:
    names: set[str] = set()
    ends = [0] * len(buckets)
    for spec in tensors:
        if spec.name in names:
            raise ManifestError(f"tensor {spec.name!r} occurs twice")
        names.add(spec.name)
        if not 0 <= spec.bucket < len(buckets):
            raise ManifestError(
                f"tensor {spec.name!r} lies in bucket {spec.bucket} of {len(buckets)}"
            )
        if spec.offset < ends[spec.bucket]:
            raise ManifestError(
                f"tensor {spec.name!r} starts at byte {spec.offset} of bucket {spec.bucket}, "
                f"inside the one before it, which ends at {ends[spec.bucket]}"
            )
        ends[spec.bucket] = spec.offset + spec.nbytes
        if ends[spec.bucket] > buckets[spec.bucket].nbytes:
            raise ManifestError(
                f"tensor {spec.name!r} ends at byte {ends[spec.bucket]} of bucket {spec.bucket}, "
                f"which has {buckets[spec.bucket].nbytes}"
            )


def tensor_bytes(name: str, dtype: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a dense tensor; ManifestError if its dtype or shape cannot be sent."""
    if dtype not in ITEM_BYTES:
        allowed = ", ".join(ITEM_BYTES)
        raise ManifestError(f"tensor {name!r} has dtype {dtype!r}; allowed are {allowed}")
    if any(size <= 0 for size in shape):
        raise ManifestError(f"tensor {name!r} has shape {shape}; expected sizes above 0")
    return math.prod(shape) * ITEM_BYTES[dtype]


def check_signature(manifest: Manifest, expected: Signature) -> None:
    """Raise IncompatibleWeights for other names, shapes or dtypes; an adapter may change fewer."""
    signature = manifest.signature
    unknown = sorted(signature.keys() - expected.keys())
    missing = sorted(expected.keys() - signature.keys()) if manifest.adapter is None else []
    if unknown or missing:
        raise IncompatibleWeights(
            f"version {manifest.version} has {len(unknown)} tensors that the engine does not know "
            f"({', '.join(unknown[:3]) or 'none'}) and lacks {len(missing)} that it needs "
            f"({', '.join(missing[:3]) or 'none'})"
        )
    for name, (dtype, shape) in signature.items():
        expected_dtype, expected_shape = expected[name]
        if shape != expected_shape or expected_dtype not in (None, dtype):
            raise IncompatibleWeights(
                f"tensor {name!r} of version {manifest.version} is {dtype} {shape}; the engine "
                f"expects {expected_dtype or 'any dtype'} {expected_shape}"
            )

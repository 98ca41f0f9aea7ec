"""What one version of the weights consists of: the record that makes a version exist.

A manifest is written last, when every bucket is stored and checksummed; who holds one can check
all bytes before touching an engine. Pure and without torch. How tensors are laid out is decided
in `buckets`, how bytes are stored and found in `transports`.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from weight_sync.errors import IncompatibleWeights, ManifestError

ITEM_BYTES: Mapping[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}
"""Bytes of one element, by the name that torch gives the dtype. Nothing else may travel."""

FORMAT = 2

Signature = Mapping[str, tuple[str | None, tuple[int, ...]]]
"""Dtype (None: any) and shape of every tensor of a model, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor inside a bucket, in row-major order."""

    name: str
    """As in the model folder that transformers loads."""
    dtype: str
    """A key of `ITEM_BYTES`."""
    shape: tuple[int, ...]
    bucket: int
    """Index into the manifest's buckets."""
    offset: int
    """First byte inside the bucket."""
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A piece of memory that holds whole tensors."""

    nbytes: int
    checksum: str
    """xxh3_128 of all its bytes, padding included, as 32 hexadecimal digits."""
    location: str
    """Where the transport finds it; means nothing to anyone else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """How a receiver that holds an earlier version may get this one."""

    base_version: int
    """The version whose buckets the patches apply to; they name its checksums themselves."""
    buckets: tuple[Bucket, ...]
    """A patch (`codecs.delta`) for each bucket of the version, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """All tensors of one policy version and where their bytes lie.

    Raises:
        ManifestError: At construction, where the fields contradict each other.
    """

    version: int
    """Policy version, from 0."""
    tensors: tuple[TensorSpec, ...]
    buckets: tuple[Bucket, ...]
    created_at: float
    """Epoch seconds of the call of `publish`."""
    delta: Delta | None = None
    """None: there is only the whole version, by codec `full`, or because no delta would pay."""
    changed: float | None = None
    """Share of elements that differ from the base's, in [0, 1]; None where nobody compared."""

    def __post_init__(self) -> None:
        if self.version < 0:
            raise ManifestError(f"version is {self.version}; policy versions start at 0")
        if not self.tensors:
            raise ManifestError(f"version {self.version} has no tensors")
        _check_buckets(self.buckets)
        _check_tensors(self.tensors, self.buckets)
        if self.delta is not None:
            _check_delta(self.delta, self.version, len(self.buckets))

    @property
    def nbytes(self) -> int:
        """Bytes of all buckets, padding included; of the whole version, whatever travels."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def signature(self) -> Signature:
        """Dtype and shape of every tensor, by name."""
        return {spec.name: (spec.dtype, spec.shape) for spec in self.tensors}

    def to_json(self) -> str:
        """The manifest as one line of JSON."""
        return json.dumps({"format": FORMAT, **asdict(self)}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Reads what `to_json` wrote.

        Raises:
            ManifestError: Not JSON, of another format, or with wrong, missing or unknown fields.
        """
        try:
            fields: dict[str, Any] = json.loads(text)
            found = fields.pop("format")
            if found != FORMAT:
                raise ManifestError(f"manifest has format {found}; this build reads {FORMAT}")
            tensors = tuple(
                TensorSpec(**{**spec, "shape": tuple(spec["shape"])})
                for spec in fields.pop("tensors")
            )
            buckets = tuple(Bucket(**bucket) for bucket in fields.pop("buckets"))
            delta = fields.pop("delta")
            if delta is not None:
                patches = tuple(Bucket(**bucket) for bucket in delta.pop("buckets"))
                delta = Delta(buckets=patches, **delta)
            return cls(tensors=tensors, buckets=buckets, delta=delta, **fields)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ManifestError(f"not a manifest: {error!r} in {text[:80]!r}") from error


def _check_buckets(buckets: Iterable[Bucket]) -> None:
    for index, bucket in enumerate(buckets):
        if bucket.nbytes <= 0:
            raise ManifestError(f"bucket {index} has {bucket.nbytes} bytes; expected more than 0")
        if len(bucket.checksum) != 32 or set(bucket.checksum) - set("0123456789abcdef"):
            raise ManifestError(
                f"bucket {index} has checksum {bucket.checksum!r}; expected 32 hexadecimal digits"
            )


def _check_delta(delta: Delta, version: int, buckets: int) -> None:
    if not 0 <= delta.base_version < version:
        raise ManifestError(f"version {version} has a delta on version {delta.base_version}")
    if len(delta.buckets) != buckets:
        raise ManifestError(f"a delta has {len(delta.buckets)} patches for {buckets} buckets")
    _check_buckets(delta.buckets)


def _check_tensors(tensors: Iterable[TensorSpec], buckets: tuple[Bucket, ...]) -> None:
    names: set[str] = set()
    ends = [0] * len(buckets)
    for spec in tensors:
        if spec.name in names:
            raise ManifestError(f"tensor {spec.name!r} occurs twice")
        names.add(spec.name)
        expected = tensor_bytes(spec.name, spec.dtype, spec.shape)
        if spec.nbytes != expected:
            raise ManifestError(
                f"tensor {spec.name!r} has {spec.nbytes} bytes; {spec.dtype} of shape "
                f"{spec.shape} has {expected}"
            )
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
    """Bytes of a dense tensor.

    Raises:
        ManifestError: A dtype that may not travel, or a tensor without elements.
    """
    if dtype not in ITEM_BYTES:
        allowed = ", ".join(ITEM_BYTES)
        raise ManifestError(f"tensor {name!r} has dtype {dtype!r}; allowed are {allowed}")
    if any(size <= 0 for size in shape):
        raise ManifestError(f"tensor {name!r} has shape {shape}; expected sizes above 0")
    return math.prod(shape) * ITEM_BYTES[dtype]


def check_signature(manifest: Manifest, expected: Signature) -> None:
    """Refuses weights of another model.

    Raises:
        IncompatibleWeights: A foreign or missing name, another shape, or another dtype.
    """
    found = manifest.signature
    foreign, missing = (
        sorted(found.keys() - expected.keys()),
        sorted(expected.keys() - found.keys()),
    )
    if foreign or missing:
        raise IncompatibleWeights(
            f"version {manifest.version} has {len(foreign)} tensors that the engine does not know "
            f"({', '.join(foreign[:3]) or 'none'}) and lacks {len(missing)} that it needs "
            f"({', '.join(missing[:3]) or 'none'})"
        )
    for name, (dtype, shape) in found.items():
        wanted_dtype, wanted_shape = expected[name]
        if shape != wanted_shape or wanted_dtype not in (None, dtype):
            raise IncompatibleWeights(
                f"tensor {name!r} of version {manifest.version} is {dtype} {shape}; the engine "
                f"expects {wanted_dtype or 'any dtype'} {wanted_shape}"
            )

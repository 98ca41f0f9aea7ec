"""The seam between a version's bytes and the way they travel.

A transport keeps buckets readable for other processes and verifies what it reads. It knows
nothing of tensors, versions' meaning or engines.
`tests/weight_sync/transports/test_transport_contract.py` is run against every implementation.
"""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from weight_sync.manifest import Bucket, Manifest, TensorSpec


class Piece(NamedTuple):
    """A part of a bucket."""

    offset: int
    """First byte inside the bucket."""
    memory: memoryview
    """One-dimensional bytes; must not change before `Transport.write` returns."""
    tensor: TensorSpec | None = None
    """What it is, for transports whose files say so; None: bytes that only a codec can read."""


class StagedBucket(Protocol):
    """A verified bucket that stays readable, whatever its publisher does, until closed."""

    @property
    def bucket(self) -> Bucket:
        """The bucket with a location that is valid as long as this object is open."""
        ...

    @property
    def memory(self) -> memoryview:
        """All bytes of the bucket, not copied; writing to it changes nobody else's."""
        ...

    def close(self) -> None:
        """Gives the bytes back; views of `memory` that still exist stay valid."""
        ...


class Transport(Protocol):
    """Moves buckets from one publisher to many receivers."""

    def write(self, version: int, nbytes: int, pieces: Iterable[Piece]) -> Bucket:
        """Publisher: stores one bucket of a version; it can be opened as soon as this returns.

        Args:
            version: What `commit` groups by.
            nbytes: Size of the bucket, above 0; bytes that no piece covers are 0.
            pieces: Ascending and without overlap.
        """
        ...

    def commit(self, manifest: Manifest) -> None:
        """Publisher: this version was announced; gives back what all older ones occupy.

        Opening an older bucket fails from now on, or still yields exactly its bytes. What is
        staged already is not affected.
        """
        ...

    def open(self, bucket: Bucket) -> StagedBucket:
        """Receiver: fetches and verifies one bucket.

        Raises:
            StagingError: It is gone, of another size, could still change, or its checksum differs.
        """
        ...

    def close(self) -> None:
        """Gives back what this process holds; harmless to call twice."""
        ...

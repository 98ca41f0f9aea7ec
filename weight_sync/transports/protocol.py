"""The interface of transports, which move the bytes of a version between processes."""

from collections.abc import Iterable
from typing import Protocol

from weight_sync.buckets import Piece
from weight_sync.manifest import Bucket, Manifest
from weight_sync.transports.sealed_memory import SealedBucket


class Transport(Protocol):
    """Moves buckets from one publisher to many receivers.

    `write` and `open` are called from several threads at a time.
    """

    def write(self, version: int, nbytes: int, pieces: Iterable[Piece]) -> Bucket:
        """Store one bucket of a version, as publisher; it can be opened once this returns.

        Args:
            version: The version that `commit` names.
            nbytes: Size of the bucket, above 0; bytes that no piece covers are 0.
            pieces: Ascending and without overlap.
        """

    def commit(self, manifest: Manifest) -> None:
        """Remove all older versions, as publisher, once this version was announced.

        Opening an older bucket fails from now on, or still yields exactly its bytes. Buckets that a
        receiver has open stay valid.
        """

    def open(self, bucket: Bucket) -> SealedBucket:
        """Fetch and verify one bucket, as receiver; it stays readable until closed.

        Raises StagingError if it is gone, could still change, or has another size or checksum.
        """

    def close(self) -> None:
        """Release everything that this process holds; may be called twice."""

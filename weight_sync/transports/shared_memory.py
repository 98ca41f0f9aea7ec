"""Transport `shared_memory`: sealed memory of one node, for learner and engines on that node."""

from collections.abc import Iterable

from weight_sync.buckets import Piece
from weight_sync.manifest import Bucket, Manifest
from weight_sync.transports.protocol import Transport
from weight_sync.transports.sealed_memory import SealedBucket, open_verified, seal


class SharedMemoryTransport(Transport):
    """Stores and opens buckets in the memory of this node; `write` copies once."""

    def __init__(self) -> None:
        self._stored: dict[int, list[SealedBucket]] = {}

    def write(self, version: int, nbytes: int, pieces: Iterable[Piece]) -> Bucket:
        sealed = seal(nbytes, pieces)
        self._stored.setdefault(version, []).append(sealed)
        return sealed.bucket

    def commit(self, manifest: Manifest) -> None:
        self._remove([version for version in self._stored if version < manifest.version])

    def open(self, bucket: Bucket) -> SealedBucket:
        return open_verified(bucket)

    def close(self) -> None:
        self._remove([*self._stored])

    def _remove(self, versions: Iterable[int]) -> None:
        for version in versions:
            for sealed in self._stored.pop(version):
                sealed.close()

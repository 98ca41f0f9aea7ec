"""Buckets as sealed anonymous memory, which another process of the node can map.

Every bucket is a memfd at `/proc/<pid>/fd/<n>`, sealed once written. The kernel frees it with the
last process that holds it. Processes that share buckets need the same user and process namespace.
"""

import errno
import fcntl
import mmap
import os
import re
from collections.abc import Iterable
from contextlib import closing
from typing import BinaryIO

import xxhash

from weight_sync.buckets import Piece
from weight_sync.errors import StagingError
from weight_sync.manifest import Bucket
from weight_sync.open_files import RAISE_LIMIT, allow_open_files

SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

_LOCATION = re.compile(r"/proc/\d+/fd/\d+")


class SealedBucket:
    """A bucket that this process holds through a file descriptor of its own, until closed."""

    def __init__(self, descriptor: int, nbytes: int, checksum: str) -> None:
        self._descriptor = descriptor
        self._memory: memoryview | None = None
        self.bucket = Bucket(
            nbytes=nbytes, checksum=checksum, location=f"/proc/{os.getpid()}/fd/{descriptor}"
        )
        """Its location is valid on this node as long as this object is open."""

    @property
    def memory(self) -> memoryview:
        """All bytes of the bucket, mapped on first use; writing to it changes nobody else's."""
        if self._descriptor < 0:
            raise ValueError("this bucket was closed")
        if self._memory is None:
            size = self.bucket.nbytes
            self._memory = memoryview(mmap.mmap(self._descriptor, size, access=mmap.ACCESS_COPY))
        return self._memory

    def close(self) -> None:
        """Release the bucket; views of `memory` that still exist stay valid."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor, self._memory = -1, None


def seal(nbytes: int, pieces: Iterable[Piece]) -> SealedBucket:
    """Write a bucket to memory of this node and seal it; arguments as of `Transport.write`."""
    try:
        descriptor = os.memfd_create("headway-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        raise OSError(
            error.errno,
            f"this process may open {allow_open_files()} files (ulimit -Hn), too few for the "
            f"buckets of two versions of the weights: {RAISE_LIMIT} on every node, "
            "before `ray start`",
        ) from None
    try:
        os.ftruncate(descriptor, nbytes)
        with open(descriptor, "wb", closefd=False) as file:
            checksum = bucket_checksum(nbytes, pieces, file)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        return SealedBucket(descriptor, nbytes, checksum)
    except BaseException:
        os.close(descriptor)
        raise


def seal_verified(bucket: Bucket, nbytes: int, pieces: Iterable[Piece]) -> SealedBucket:
    """Seal bytes that were fetched for a bucket; StagingError if their checksum is another."""
    sealed = seal(nbytes, pieces)
    return _verified(sealed, bucket, sealed.bucket.checksum)


def bucket_checksum(nbytes: int, pieces: Iterable[Piece], copy: BinaryIO | None = None) -> str:
    """Return xxh3_128 of a bucket, gaps included; write each piece to `copy` while it is cached.

    Raises ValueError if the pieces overlap or exceed `nbytes`.
    """
    digest, end = xxhash.xxh3_128(), 0
    for piece in pieces:
        digest.update(bytes(piece.offset - end))
        digest.update(piece.memory)
        end = piece.offset + piece.memory.nbytes
        if copy is not None:
            copy.seek(piece.offset)
            copy.write(piece.memory)
    digest.update(bytes(nbytes - end))
    return digest.hexdigest()


def is_sealed(bucket: Bucket) -> bool:
    """Return True if the bucket's location is sealed memory of a node."""
    return _LOCATION.fullmatch(bucket.location) is not None


def open_verified(bucket: Bucket) -> SealedBucket:
    """Open a sealed bucket of this node and verify it; raises as `Transport.open` does."""
    opened = _open_sealed(bucket)
    return _verified(opened, bucket, xxhash.xxh3_128_hexdigest(opened.memory))


def map_verified(bucket: Bucket) -> memoryview:
    """Map a bucket that a receiver on this node holds and has verified, without hashing it again.

    Raises StagingError if it is gone, has another size, or could still change.
    """
    with closing(_open_sealed(bucket)) as opened:
        return opened.memory


def _verified(opened: SealedBucket, bucket: Bucket, checksum: str) -> SealedBucket:
    """Return a bucket whose checksum is that of the manifest; close any other."""
    if checksum == bucket.checksum:
        return opened
    opened.close()
    raise StagingError(
        f"bucket at {bucket.location} has checksum {checksum}; its manifest says {bucket.checksum}"
    )


def _open_sealed(bucket: Bucket) -> SealedBucket:
    """Open a bucket for reading after checking its size and seals."""
    if not is_sealed(bucket):
        raise StagingError(f"location is {bucket.location!r}; expected /proc/<pid>/fd/<n>")
    try:
        descriptor = os.open(bucket.location, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise StagingError(f"bucket at {bucket.location} cannot be opened: {error}") from error
    try:
        size = os.fstat(descriptor).st_size
        if size == bucket.nbytes and fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS == SEALS:
            return SealedBucket(descriptor, bucket.nbytes, bucket.checksum)
        fault = "is not sealed: it could still change"
        if size != bucket.nbytes:
            fault = f"has {size} bytes; its manifest says {bucket.nbytes}"
    except OSError as error:
        fault = f"is no shared memory: {error}"
    os.close(descriptor)
    raise StagingError(f"bucket at {bucket.location} {fault}")

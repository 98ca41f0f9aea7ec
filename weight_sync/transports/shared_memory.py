"""Buckets as sealed anonymous memory, for learner and engines on one node.

Every bucket is a memfd: a file without a name, whose location is `/proc/<pid>/fd/<n>`. Once
written it is sealed, so that what a receiver has verified cannot change any more, and nobody has
to verify it again. The kernel frees it when the last process that holds it ends, SIGKILL
included: nothing is ever left in /dev/shm. Publisher and receivers need one user and one process
namespace. Leaves out transfer between nodes.
"""

import fcntl
import mmap
import os
import re
from collections.abc import Callable, Iterable

import xxhash

from weight_sync.errors import StagingError
from weight_sync.manifest import Bucket, Manifest
from weight_sync.transports.protocol import Piece

SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

_LOCATION = re.compile(r"/proc/\d+/fd/\d+")


class SharedMemoryBucket:
    """A bucket held by this process through a file descriptor of its own (a `StagedBucket`)."""

    def __init__(self, descriptor: int, nbytes: int, checksum: str) -> None:
        self._descriptor = descriptor
        self._memory: memoryview | None = None
        self.bucket = Bucket(
            nbytes=nbytes, checksum=checksum, location=f"/proc/{os.getpid()}/fd/{descriptor}"
        )

    @property
    def memory(self) -> memoryview:
        """See `StagedBucket.memory`; mapped when first asked for."""
        if self._descriptor < 0:
            raise ValueError("this bucket was closed")
        if self._memory is None:
            self._memory = _map(self._descriptor, self.bucket.nbytes)
        return self._memory

    def close(self) -> None:
        """See `StagedBucket.close`."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor, self._memory = -1, None


class SharedMemoryTransport:
    """Stores and opens buckets in the memory of this node (a `Transport`)."""

    def __init__(self) -> None:
        self._held: dict[int, list[SharedMemoryBucket]] = {}

    def write(self, version: int, nbytes: int, pieces: Iterable[Piece]) -> Bucket:
        """See `Transport.write`; one copy, checksummed on the way."""
        held = seal(nbytes, pieces)
        self._held.setdefault(version, []).append(held)
        return held.bucket

    def commit(self, manifest: Manifest) -> None:
        """See `Transport.commit`."""
        self._forget(before=manifest.version)

    def open(self, bucket: Bucket) -> SharedMemoryBucket:
        """See `Transport.open`."""
        descriptor = _open_sealed(bucket)
        try:
            held = SharedMemoryBucket(descriptor, bucket.nbytes, bucket.checksum)
            check_checksum(bucket, xxhash.xxh3_128_hexdigest(held.memory))
            return held
        except BaseException:
            os.close(descriptor)
            raise

    def close(self) -> None:
        """See `Transport.close`; every version is gone."""
        self._forget(before=max(self._held, default=0) + 1)

    def _forget(self, before: int) -> None:
        for version in [held for held in self._held if held < before]:
            for bucket in self._held.pop(version):
                bucket.close()


def seal(nbytes: int, pieces: Iterable[Piece]) -> SharedMemoryBucket:
    """Makes a bucket of this node that nobody can change any more.

    Args:
        nbytes: Its size, above 0; bytes that no piece covers are 0.
        pieces: Ascending and without overlap.
    """
    descriptor = os.memfd_create("headway-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, nbytes)
        checksum = hashed(nbytes, pieces, lambda piece: _write_all(descriptor, piece))
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        return SharedMemoryBucket(descriptor, nbytes, checksum)
    except BaseException:
        os.close(descriptor)
        raise


def hashed(
    nbytes: int, pieces: Iterable[Piece], each: Callable[[Piece], None] = lambda piece: None
) -> str:
    """The checksum of a bucket, gaps included; calls `each` while its piece is in the cache."""
    digest, end = xxhash.xxh3_128(), 0
    for piece in pieces:
        digest.update(bytes(piece.offset - end))
        digest.update(piece.memory)
        end = piece.offset + piece.memory.nbytes
        each(piece)
    digest.update(bytes(nbytes - end))
    return digest.hexdigest()


def is_staged(bucket: Bucket) -> bool:
    """Whether a location is one that a receiver of this node holds."""
    return _LOCATION.fullmatch(bucket.location) is not None


def check_checksum(bucket: Bucket, found: str) -> None:
    """Compares what was read with what was promised.

    Raises:
        StagingError: They differ.
    """
    if found != bucket.checksum:
        raise StagingError(
            f"bucket at {bucket.location} has checksum {found}; its manifest says {bucket.checksum}"
        )


def map_verified(bucket: Bucket) -> memoryview:
    """Maps a bucket that a receiver on this node holds and has verified; does not copy or hash.

    Raises:
        StagingError: It is gone, of another size, or could still change.
    """
    descriptor = _open_sealed(bucket)
    try:
        return _map(descriptor, bucket.nbytes)
    finally:
        os.close(descriptor)


def _open_sealed(bucket: Bucket) -> int:
    """Opens a bucket for reading after checking size and seals."""
    if not _LOCATION.fullmatch(bucket.location):
        raise StagingError(f"location is {bucket.location!r}; expected /proc/<pid>/fd/<n>")
    try:
        descriptor = os.open(bucket.location, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise StagingError(f"bucket at {bucket.location} cannot be opened: {error}") from error
    try:
        size = os.fstat(descriptor).st_size
        if size != bucket.nbytes:
            raise StagingError(
                f"bucket at {bucket.location} has {size} bytes; its manifest says {bucket.nbytes}"
            )
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        if seals & SEALS != SEALS:
            raise StagingError(f"bucket at {bucket.location} is not sealed: it could still change")
    except OSError as error:
        os.close(descriptor)
        raise StagingError(f"bucket at {bucket.location} is no shared memory: {error}") from error
    except StagingError:
        os.close(descriptor)
        raise
    return descriptor


def _map(descriptor: int, nbytes: int) -> memoryview:
    """Maps copy-on-write: zero copies while read, and what a reader writes stays its own."""
    return memoryview(mmap.mmap(descriptor, nbytes, access=mmap.ACCESS_COPY))


def _write_all(descriptor: int, piece: Piece) -> None:
    """Writes a whole piece; one call moves at most 2 GiB."""
    done = 0
    while done < piece.memory.nbytes:
        done += os.pwrite(descriptor, piece.memory[done:], piece.offset + done)

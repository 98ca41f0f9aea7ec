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
from collections.abc import Iterable

import xxhash

from weight_sync.errors import StagingError
from weight_sync.manifest import Bucket

SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

_LOCATION = re.compile(r"/proc/\d+/fd/\d+")


class SharedMemoryBucket:
    """A bucket held by this process through a file descriptor of its own (a `StagedBucket`)."""

    def __init__(self, descriptor: int, memory: memoryview, checksum: str) -> None:
        self._descriptor = descriptor
        self.memory = memory
        self.bucket = Bucket(
            nbytes=memory.nbytes, checksum=checksum, location=f"/proc/{os.getpid()}/fd/{descriptor}"
        )

    def close(self) -> None:
        """See `StagedBucket.close`."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self.memory = memoryview(b"")


class SharedMemoryTransport:
    """Stores and opens buckets in the memory of this node (a `Transport`)."""

    def __init__(self) -> None:
        self._held: dict[int, list[int]] = {}

    def write(self, version: int, nbytes: int, pieces: Iterable[tuple[int, memoryview]]) -> Bucket:
        """See `Transport.write`; one copy, checksummed on the way."""
        descriptor = os.memfd_create(
            f"headway-weights-{version}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        )
        try:
            os.ftruncate(descriptor, nbytes)
            digest, end = xxhash.xxh3_128(), 0
            for offset, piece in pieces:
                digest.update(bytes(offset - end))
                digest.update(piece)
                end = offset + piece.nbytes
                _write_all(descriptor, piece, offset)
            digest.update(bytes(nbytes - end))
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        except BaseException:
            os.close(descriptor)
            raise
        self._held.setdefault(version, []).append(descriptor)
        return Bucket(
            nbytes=nbytes,
            checksum=digest.hexdigest(),
            location=f"/proc/{os.getpid()}/fd/{descriptor}",
        )

    def retire(self, before: int) -> None:
        """See `Transport.retire`."""
        for version in [held for held in self._held if held < before]:
            for descriptor in self._held.pop(version):
                os.close(descriptor)

    def open(self, bucket: Bucket) -> SharedMemoryBucket:
        """See `Transport.open`."""
        descriptor = _open_sealed(bucket)
        try:
            memory = _map(descriptor, bucket.nbytes)
            checksum = xxhash.xxh3_128_hexdigest(memory)
            if checksum != bucket.checksum:
                raise StagingError(
                    f"bucket at {bucket.location} has checksum {checksum}; its manifest says "
                    f"{bucket.checksum}"
                )
            return SharedMemoryBucket(descriptor, memory, checksum)
        except BaseException:
            os.close(descriptor)
            raise

    def close(self) -> None:
        """See `Transport.close`."""
        self.retire(max(self._held, default=0) + 1)


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


def _write_all(descriptor: int, piece: memoryview, offset: int) -> None:
    """Writes a whole piece; one call moves at most 2 GiB."""
    done = 0
    while done < piece.nbytes:
        done += os.pwrite(descriptor, piece[done:], offset + done)

"""Transport `object_store`: Ray's object store, for engines on any node of a cluster.

    learner's node    publisher ─▶ sealed memory ─▶ Uploader ─ray.put─▶ object store
    another node      object store ─one pull─▶ Downloader ─▶ sealed memory ─▶ every engine there

Engines on the learner's node open its memory directly. Uploader and downloaders keep the newest
version, and end with the caller that created them.
"""

import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from headway.ray_service import answer_of
from weight_sync.buckets import Piece
from weight_sync.errors import StagingError
from weight_sync.manifest import Bucket, Manifest
from weight_sync.open_files import allow_open_files
from weight_sync.progress import STREAMS, allowance, show
from weight_sync.transports.protocol import Transport
from weight_sync.transports.sealed_memory import (
    SealedBucket,
    is_sealed,
    open_verified,
    seal_verified,
)
from weight_sync.transports.shared_memory import SharedMemoryTransport

RETRY_SECONDS = 0.1
"""Wait before an uploader or downloader that died is created again."""
CONCURRENT_CALLS = 64
"""Buckets that an uploader or a downloader is asked for at a time."""
T = TypeVar("T")
_LOCATION = re.compile(r"ray/([0-9a-f]+)/([0-9a-f]{8})/(\d+)(/proc/\d+/fd/\d+)")


class _Location(NamedTuple):
    """The parsed location of a bucket: Ray's id of the publisher's node, and where it is there."""

    node: str
    publisher: str
    version: int
    local: str


class ObjectStoreTransport(Transport):
    """Stores buckets on this node and opens them from any; needs a cluster."""

    def __init__(self, *, timeout: float = 60.0) -> None:
        self.node: str = ray.get_runtime_context().get_node_id()
        self._publisher = uuid.uuid4().hex[:8]
        self._local = SharedMemoryTransport()
        self._downloader = _NodeActor(Downloader, timeout, timeout)

    def write(self, version: int, nbytes: int, pieces: Iterable[Piece]) -> Bucket:
        bucket = self._local.write(version, nbytes, pieces)
        location = f"ray/{self.node}/{self._publisher}/{version}{bucket.location}"
        return replace(bucket, location=location)

    def commit(self, manifest: Manifest) -> None:
        self._local.commit(manifest)

    def open(self, bucket: Bucket) -> SealedBucket:
        if is_sealed(bucket):
            return open_verified(bucket)
        match = _LOCATION.fullmatch(bucket.location)
        if not match:
            raise StagingError(
                f"location is {bucket.location!r}; expected ray/<node>/<publisher>/<version>/…"
            )
        location = _Location(match[1], match[2], int(match[3]), match[4])
        if location.node == self.node:
            return open_verified(replace(bucket, location=location.local))
        return open_verified(self._downloader.call(self.node, "fetch", bucket, location))

    def close(self) -> None:
        self._local.close()


class OncePerBucket(Generic[T]):
    """Makes a result for each bucket of the newest version once, however many threads ask."""

    def __init__(self, drop: Callable[[T], None]) -> None:
        self._drop = drop
        self._lock = threading.Lock()
        self._version = -1
        self._made: dict[Bucket, Future[T]] = {}

    def get(self, version: int, bucket: Bucket, make: Callable[[], T]) -> T:
        """Return a bucket's result, and drop those of older versions.

        Raises StagingError if a newer version was asked for before, and what `make` raises.
        """
        with self._lock:
            if version < self._version:
                raise StagingError(
                    f"version {version} was superseded by {self._version} on this node"
                )
            if version > self._version:
                for old in self._made.values():
                    old.add_done_callback(lambda old: old.exception() or self._drop(old.result()))
                self._version, self._made = version, {}
            making = self._made.get(bucket)
            result = self._made.setdefault(bucket, Future())
        if making is None:
            try:
                result.set_result(make())
            except BaseException as error:
                with self._lock:
                    self._made = {b: made for b, made in self._made.items() if made is not result}
                result.set_exception(error)
                raise
        return result.result()


class Uploader:
    """On the publisher's node: puts each bucket into the object store once."""

    def __init__(self) -> None:
        allow_open_files()
        self._objects: OncePerBucket[Any] = OncePerBucket(lambda _: None)

    def put(self, bucket: Bucket, location: _Location) -> list[Any]:
        """Return the object with the bytes of a bucket, in a list so that Ray does not fetch it."""

        def store() -> Any:
            with closing(open_verified(replace(bucket, location=location.local))) as opened:
                return ray.put(np.frombuffer(opened.memory, dtype=np.uint8))

        return [self._objects.get(location.version, bucket, store)]


class Downloader:
    """On a node with engines: pulls each bucket once, into sealed memory."""

    def __init__(self, timeout: float) -> None:
        allow_open_files()
        self._timeout = timeout
        self._fetched: OncePerBucket[SealedBucket] = OncePerBucket(SealedBucket.close)
        # Half the time of this actor's own caller, so that of the two the one that hangs is killed.
        self._uploader = _NodeActor(Uploader, timeout / 2)

    def fetch(self, bucket: Bucket, location: _Location) -> Bucket:
        """Return the bucket with a location of this node, valid until a newer version is fetched.

        Raises StagingError as `Transport.open` does, or if a newer version was fetched before.
        """
        pull = lambda: self._pull(bucket, location)  # noqa: E731
        return self._fetched.get(location.version, bucket, pull).bucket

    def _pull(self, bucket: Bucket, location: _Location) -> SealedBucket:
        deadline = time.monotonic() + _seconds(self._timeout, bucket)
        (stored,) = self._uploader.call(location.node, "put", bucket, location)
        name = f"the object of the bucket at {bucket.location}"
        left = max(0.0, deadline - time.monotonic())
        content = answer_of(stored, name, left, gone=StagingError, late=StagingError)
        return seal_verified(bucket, content.nbytes, [Piece(0, memoryview(content))])


class _NodeActor:
    """The named actor of a publisher on one node, shared by all callers, created when needed."""

    def __init__(
        self, kind: type[Uploader | Downloader], timeout: float, *arguments: object
    ) -> None:
        self._kind, self._timeout, self._arguments = kind, timeout, arguments
        self._lock = threading.Lock()
        self._newest: tuple[str, Any] = "", None
        """Name and handle of the actor called last: Ray ends it with the handle that created it."""

    def call(self, node: str, method: str, bucket: Bucket, location: _Location) -> Any:
        """Call a method on a node, again if the actor dies; StagingError if that takes too long.

        An actor that had all of that time and does not answer may hang, so it is killed.
        """
        name = f"headway-{self._kind.__name__.lower()}-{location.publisher}-{node}"
        seconds = _seconds(self._timeout, bucket)
        deadline = time.monotonic() + seconds
        actor, is_first = None, True
        while True:
            try:
                actor = self._other_than(actor, name, node)
                answer = getattr(actor, method).remote(bucket, location)
                return ray.get(answer, timeout=max(0.0, deadline - time.monotonic()))
            except ray.exceptions.RayTaskError as error:
                raise error.cause from error
            except (ray.exceptions.RayError, ValueError) as error:
                died = isinstance(error, ray.exceptions.RayActorError)
                if is_first and isinstance(error, ray.exceptions.GetTimeoutError):
                    ray.kill(actor)
                is_first = False
                if not died or time.monotonic() > deadline:
                    raise StagingError(
                        f"bucket at {bucket.location} cannot be fetched: {name} did not "
                        f"answer within {show(seconds)} s ({type(error).__name__}: {error})"
                    ) from error
            time.sleep(RETRY_SECONDS)

    def _other_than(self, dead: Any, name: str, node: str) -> Any:
        """Return the actor of a name, which is made again if it is the dead one."""
        with self._lock:
            known, actor = self._newest
            if known != name or actor is dead:
                remote = ray.remote(self._kind).options(
                    name=name,
                    get_if_exists=True,
                    num_cpus=0,
                    max_concurrency=CONCURRENT_CALLS,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
                )
                actor = remote.remote(*self._arguments)
                self._newest = name, actor
            return actor


def _seconds(timeout: float, bucket: Bucket) -> float:
    """Return the deadline of a bucket that shares the way with others of its size."""
    return allowance(timeout, STREAMS * bucket.nbytes)

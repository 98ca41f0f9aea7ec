"""Transport `object_store`: Ray's object store, for engines on any node of a cluster.

    learner's node    publisher ─▶ sealed memory ─▶ Uploader ─ray.put─▶ object store
    another node      object store ─one pull─▶ Downloader ─▶ sealed memory ─▶ every engine there

Engines on the learner's node open its memory directly. Uploader and downloaders keep the newest
version, end with the caller that created them, and are created again by the next.
"""

import re
import time
import uuid
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from weight_sync.buckets import Piece
from weight_sync.errors import StagingError
from weight_sync.manifest import Bucket, Manifest
from weight_sync.ray_calls import remote_errors
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


class Uploader:
    """On the publisher's node: puts each bucket into the object store once."""

    def __init__(self) -> None:
        self._version = -1
        self._objects: dict[Bucket, Any] = {}

    def put(self, bucket: Bucket, location: _Location) -> list[Any]:
        """Return the object with the bytes of a bucket, in a list so that Ray does not fetch it.

        Raises StagingError if the publisher has removed the bucket, or is gone.
        """
        if location.version > self._version:
            self._version, self._objects = location.version, {}
        stored = self._objects.get(bucket)
        if stored is None:
            opened = open_verified(replace(bucket, location=location.local))
            try:
                stored = ray.put(np.frombuffer(opened.memory, dtype=np.uint8))
            finally:
                opened.close()
            if location.version == self._version:
                self._objects[bucket] = stored
        return [stored]


class Downloader:
    """On a node with engines: pulls each bucket once, into sealed memory."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._version = -1
        self._fetched: dict[Bucket, SealedBucket] = {}
        self._uploader = _NodeActor(Uploader, timeout)

    def fetch(self, bucket: Bucket, location: _Location) -> Bucket:
        """Return the bucket with a location of this node, valid until a newer version is fetched.

        Raises StagingError as `Transport.open` does, or if a newer version was fetched before.
        """
        if location.version < self._version:
            raise StagingError(
                f"version {location.version} was superseded by {self._version} on this node"
            )
        if location.version > self._version:
            self._version = location.version
            for old in self._fetched.values():
                old.close()
            self._fetched = {}
        if bucket not in self._fetched:
            self._fetched[bucket] = self._pull(bucket, location)
        return self._fetched[bucket].bucket

    def _pull(self, bucket: Bucket, location: _Location) -> SealedBucket:
        (stored,) = self._uploader.call(location.node, "put", bucket, location)
        name = f"the object of the bucket at {bucket.location}"
        with remote_errors(name, self._timeout, gone=StagingError, late=StagingError):
            content = ray.get(stored, timeout=self._timeout)
        return seal_verified(bucket, content.nbytes, [Piece(0, memoryview(content))])


class _NodeActor:
    """The named actor of a publisher on one node, shared by all callers, created when needed."""

    def __init__(
        self, kind: type[Uploader | Downloader], timeout: float, *arguments: object
    ) -> None:
        self._kind, self._timeout, self._arguments = kind, timeout, arguments
        self._name = ""
        self._actor: Any = None

    def call(self, node: str, method: str, bucket: Bucket, location: _Location) -> Any:
        """Call a method on a node, again if the actor dies; StagingError if that takes too long."""
        name = f"headway-{self._kind.__name__.lower()}-{location.publisher}-{node}"
        if name != self._name:
            self._name, self._actor = name, None
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                if self._actor is None:
                    self._actor = self._get_or_create(node)
                answer = getattr(self._actor, method).remote(bucket, location)
                return ray.get(answer, timeout=max(0.0, deadline - time.monotonic()))
            except ray.exceptions.RayTaskError as error:
                raise error.cause from error
            except (ray.exceptions.RayError, ValueError) as error:
                died = isinstance(error, ray.exceptions.RayActorError)
                if not died or time.monotonic() > deadline:
                    raise StagingError(
                        f"bucket at {bucket.location} cannot be fetched: {self._name} did not "
                        f"answer within {self._timeout:g} s ({type(error).__name__}: {error})"
                    ) from error
            self._actor = None  # it died with its creator
            time.sleep(RETRY_SECONDS)

    def _get_or_create(self, node: str) -> Any:
        remote = ray.remote(self._kind).options(
            name=self._name,
            get_if_exists=True,
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        return remote.remote(*self._arguments)

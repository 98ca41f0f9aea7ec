"""Buckets over Ray's object store, for engines on any node of a cluster.

    learner's node    publisher ─▶ sealed memory ─▶ Shelf ─ray.put─▶ object store
    another node      object store ─one pull─▶ Depot ─▶ sealed memory ─▶ every engine of the node

Engines on the learner's node open its memory directly. On every other node one process, the depot,
pulls each bucket once and seals it into memory of that node, whatever the number of its engines.
Shelf and depots are made by whoever asks first and end with it; the next one makes another. Both
keep the newest version that they were asked for. Nothing is pulled before an engine asks.
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

from weight_sync.errors import StagingError
from weight_sync.manifest import Bucket, Manifest
from weight_sync.transports.protocol import Piece
from weight_sync.transports.shared_memory import (
    SharedMemoryBucket,
    SharedMemoryTransport,
    check_checksum,
    is_staged,
    seal,
)

RETRY_SECONDS = 0.1
"""How soon a shelf or depot that died is asked for again."""
_LOCATION = re.compile(r"ray/([0-9a-f]+)/([0-9a-f]{8})/(\d+)(/proc/\d+/fd/\d+)")


class _Place(NamedTuple):
    """What a location says."""

    node: str
    """Ray's name of the publisher's node."""
    publisher: str
    version: int
    local: str
    """Where the bucket is on that node."""


class ObjectStoreTransport:
    """Stores buckets on this node and opens them from any (a `Transport`); needs a cluster.

    Args:
        timeout: Seconds that `open` waits for other processes.
    """

    def __init__(self, *, timeout: float = 60.0) -> None:
        self.node: str = ray.get_runtime_context().get_node_id()
        """Where this process runs."""
        self._publisher = uuid.uuid4().hex[:8]
        self._local = SharedMemoryTransport()
        self._timeout = timeout
        self._depots: dict[str, _Helper] = {}

    def write(self, version: int, nbytes: int, pieces: Iterable[Piece]) -> Bucket:
        """See `Transport.write`."""
        bucket = self._local.write(version, nbytes, pieces)
        place = f"ray/{self.node}/{self._publisher}/{version}{bucket.location}"
        return replace(bucket, location=place)

    def commit(self, manifest: Manifest) -> None:
        """See `Transport.commit`; shelf and depots follow when they are asked for it."""
        self._local.commit(manifest)

    def open(self, bucket: Bucket) -> SharedMemoryBucket:
        """See `Transport.open`."""
        if is_staged(bucket):
            return self._local.open(bucket)
        found = _LOCATION.fullmatch(bucket.location)
        if not found:
            raise StagingError(
                f"location is {bucket.location!r}; expected ray/<node>/<publisher>/<version>/…"
            )
        place = _Place(found[1], found[2], int(found[3]), found[4])
        if place.node == self.node:
            return self._local.open(replace(bucket, location=place.local))
        depot = self._depots.get(place.publisher)
        if depot is None:
            depot = _Helper(Depot, self.node, place.publisher, self._timeout)
            self._depots = {place.publisher: depot}
        return self._local.open(depot.ask("fetch", bucket, place))

    def close(self) -> None:
        """See `Transport.close`."""
        self._local.close()


class Shelf:
    """On the publisher's node: puts buckets into the object store, each once."""

    def __init__(self, timeout: float) -> None:
        del timeout  # it waits for nobody
        self._version = -1
        self._objects: dict[Bucket, Any] = {}

    def put(self, bucket: Bucket, place: _Place) -> list[Any]:
        """The object with the bytes of a bucket, in a list so that Ray does not fetch it.

        Raises:
            StagingError: The publisher has given the bucket back, or is gone.
        """
        if place.version > self._version:
            self._version, self._objects = place.version, {}
        found = self._objects.get(bucket)
        if found is None:
            held = SharedMemoryTransport().open(replace(bucket, location=place.local))
            try:
                found = ray.put(np.frombuffer(held.memory, dtype=np.uint8))
            finally:
                held.close()
            if place.version == self._version:
                self._objects[bucket] = found
        return [found]


class Depot:
    """On a node with engines: pulls buckets, each once, into sealed memory."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._version = -1
        self._held: dict[Bucket, SharedMemoryBucket] = {}
        self._shelves: dict[str, _Helper] = {}
        self._pulled = 0

    def fetch(self, bucket: Bucket, place: _Place) -> Bucket:
        """A bucket with a location of this node, valid until a newer version is asked for.

        Raises:
            StagingError: It cannot be had any more, or not in time, or is not what it should be.
        """
        if place.version < self._version:
            raise StagingError(
                f"version {place.version} was superseded by {self._version} on this node"
            )
        if place.version > self._version:
            self._version = place.version
            for old in self._held.values():
                old.close()
            self._held = {}
        if bucket not in self._held:
            held = self._pull(bucket, place)
            try:
                check_checksum(bucket, held.bucket.checksum)
            except StagingError:
                held.close()
                raise
            self._held[bucket] = held
        return self._held[bucket].bucket

    def pulled(self) -> int:
        """How many buckets crossed from another node."""
        return self._pulled

    def _pull(self, bucket: Bucket, place: _Place) -> SharedMemoryBucket:
        shelf = self._shelves.get(place.publisher)
        if shelf is None:
            shelf = _Helper(Shelf, place.node, place.publisher, self._timeout)
            self._shelves = {place.publisher: shelf}
        (found,) = shelf.ask("put", bucket, place)
        try:
            content = ray.get(found, timeout=self._timeout)
        except ray.exceptions.RayError as error:
            raise StagingError(f"bucket at {bucket.location} cannot be pulled: {error}") from error
        self._pulled += 1
        return seal(content.nbytes, [Piece(0, memoryview(content))])


class _Helper:
    """A shelf or a depot as one who needs it sees it: made when first asked, and when it died."""

    def __init__(
        self, kind: type[Shelf | Depot], node: str, publisher: str, timeout: float
    ) -> None:
        self._kind, self._node, self._timeout = kind, node, timeout
        self._name = f"headway-{kind.__name__.lower()}-{publisher}-{node}"
        self._actor: Any = None

    def ask(self, method: str, bucket: Bucket, place: _Place) -> Any:
        """What a method answers.

        Raises:
            StagingError: What it raised, or that it did not answer in time.
        """
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                if self._actor is None:
                    self._actor = self._find()
                call = getattr(self._actor, method).remote(bucket, place)
                return ray.get(call, timeout=max(0.0, deadline - time.monotonic()))
            except ray.exceptions.RayTaskError as error:
                raise error.cause from error
            except ray.exceptions.RayActorError as error:  # its maker has ended: make another
                self._actor = None
                if time.monotonic() > deadline:
                    raise self._failure(bucket, error) from error
                time.sleep(RETRY_SECONDS)
            except (ray.exceptions.RayError, ValueError) as error:
                raise self._failure(bucket, error) from error

    def _find(self) -> Any:
        options = {
            "name": self._name,
            "get_if_exists": True,
            "num_cpus": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(self._node, soft=False),
        }
        return ray.remote(self._kind).options(**options).remote(self._timeout)

    def _failure(self, bucket: Bucket, error: Exception) -> StagingError:
        return StagingError(
            f"bucket at {bucket.location} cannot be had: {self._name} did not answer within "
            f"{self._timeout:g} s ({type(error).__name__}: {error})"
        )

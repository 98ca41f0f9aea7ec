"""The staged publisher stores each version in a transport and announces it.

plan ─▶ write and checksum, several buckets at a time ─▶ compare with v−1 ─▶ announce ─▶ commit
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal

import torch

from weight_sync.buckets import BucketPlan, Piece, plan_buckets
from weight_sync.codecs.delta import DeltaEncoder
from weight_sync.errors import VersionOrderError
from weight_sync.manifest import Bucket, Delta, Manifest
from weight_sync.progress import run_in_streams
from weight_sync.publish.background_publisher import BackgroundPublisher, PendingVersion
from weight_sync.publish.snapshot import Snapshot, bytes_of
from weight_sync.transports.protocol import Transport

Announce = Callable[[Manifest], Coroutine[Any, Any, None] | None]


class StagedPublisher(BackgroundPublisher):
    """Stores versions in a transport and announces them. Calls come from one thread at a time.

    Args:
        transport: Stores the buckets; closed with the publisher.
        announce: Called in the background thread with each version whose bytes can all be read. A
            coroutine that it returns is run there, in an event loop of its own.
        bucket_bytes: Size of a bucket; only a larger tensor makes a bucket exceed it.
        codec: "delta" offers a delta beside the whole version.

    For `timeout` and `wire_dtype` see `BackgroundPublisher`.
    """

    def __init__(
        self,
        transport: Transport,
        announce: Announce,
        bucket_bytes: int = 64 * 2**20,
        *,
        timeout: float = 60.0,
        codec: Literal["full", "delta"] = "full",
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(timeout=timeout, wire_dtype=wire_dtype)
        self._transport = transport
        self._announce = announce
        self.announce_seconds = 0.0
        """Time that an announcement has beyond `timeout`; a broadcaster may be made again."""
        self._bucket_bytes = bucket_bytes
        self._encoder = DeltaEncoder() if codec == "delta" else None
        self._announced: Manifest | None = None

    def _close(self) -> None:
        self._transport.close()

    def _send(self, pending: PendingVersion) -> Snapshot:
        version = pending.version
        plan, pieces = _cut(pending.snapshot, self._bucket_bytes)
        buckets = self._write(version, plan.sizes, pieces)
        self._progress.reach("it is compared with the version before", sum(plan.sizes))
        encoded = self._encoder and self._encoder.encode(version, plan, pieces, buckets)
        delta = None
        if encoded and encoded.patches is not None:
            patches = [[Piece(0, memoryview(patch))] for patch in encoded.patches]
            written = self._write(version, [len(patch) for patch in encoded.patches], patches)
            delta = Delta(base_version=encoded.base_version, buckets=written)
        manifest = Manifest(
            version=version,
            tensors=plan.tensors,
            buckets=buckets,
            created_at=pending.created_at,
            delta=delta,
            changed=encoded.changed if encoded else None,
            adapter=pending.adapter,
        )
        self._progress.reach("it is being announced", seconds=self.announce_seconds)
        self._tell(manifest)
        self._announced = manifest
        self._transport.commit(manifest)
        return pending.snapshot

    def announce_again(self) -> None:
        """Announce the newest version again, from any thread, unless a newer one came."""
        with suppress(VersionOrderError):  # a newer one was announced meanwhile
            if self._announced is not None:
                self._tell(self._announced)

    def _tell(self, manifest: Manifest) -> None:
        if announcing := self._announce(manifest):
            asyncio.run(announcing)

    def _write(
        self, version: int, sizes: Sequence[int], pieces: Sequence[Sequence[Piece]]
    ) -> tuple[Bucket, ...]:
        """Store buckets, several at a time; return them in their order."""
        write = self._transport.write
        tasks = [partial(write, version, *args) for args in zip(sizes, pieces, strict=True)]
        return tuple(run_in_streams(self._progress, "written", tasks, sizes))


def _cut(snapshot: Snapshot, bucket_bytes: int) -> tuple[BucketPlan, list[list[Piece]]]:
    """Return the plan of a snapshot and the bytes of each bucket; nothing is copied."""
    described = (
        (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in snapshot.tensors
    )
    plan = plan_buckets(described, bucket_bytes)
    pieces: list[list[Piece]] = [[] for _ in plan.sizes]
    for spec, (_, tensor) in zip(plan.tensors, snapshot.tensors, strict=True):
        pieces[spec.bucket].append(Piece(spec.offset, bytes_of(tensor), spec))
    return plan, pieces

"""Publishes the weights of a policy version through a transport, while the learner goes on.

    publish(v, tensors)     caller's thread      copies to host memory, then returns (`publishing`)
        └─▶ background      plan ─▶ write and checksum ─▶ compare with v−1 ─▶ announce ─▶ commit

Nothing is announced before every byte of it can be read. Receivers that have staged a version
hold its memory themselves, so the publisher keeps only the newest one.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Literal

import torch

from weight_sync.buckets import BucketPlan, plan_buckets
from weight_sync.checksum import bytes_of
from weight_sync.codecs.delta_encoder import DeltaEncoder, Encoded
from weight_sync.manifest import Delta, Manifest
from weight_sync.publish.background_publisher import BackgroundPublisher, PendingVersion
from weight_sync.publish.snapshot import Snapshot
from weight_sync.transports.protocol import Piece, Transport

Announce = Callable[[Manifest], Awaitable[None] | None]


class StagedPublisher(BackgroundPublisher):
    """Stores versions in a transport and announces them. Calls come from one thread at a time.

    Args:
        transport: Where buckets are kept; closed with the publisher.
        announce: Told of each complete version, from the background thread. What it returns is
            awaited there, in an event loop of its own.
        bucket_bytes: Size of one bucket.
        timeout: Seconds from a `publish` to its announcement after which the next one fails, and
            that `close` waits.
        codec: Whether a delta is offered beside the whole version.
        wire_dtype: What every tensor is cast to before it travels; None: to nothing.
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
        self._bucket_bytes = bucket_bytes
        self._encoder = DeltaEncoder() if codec == "delta" else None

    def _close(self) -> None:
        self._transport.close()

    def _send(self, handed: PendingVersion) -> Snapshot:
        """Everything between the snapshot and the announcement."""
        version = handed.version
        plan, pieces = _cut(handed.snapshot, self._bucket_bytes)
        buckets = tuple(
            self._transport.write(version, nbytes, parts)
            for nbytes, parts in zip(plan.sizes, pieces, strict=True)
        )
        encoded = self._encoder and self._encoder.encode(version, plan, pieces, buckets)
        manifest = Manifest(
            version=version,
            tensors=plan.tensors,
            buckets=buckets,
            created_at=handed.created_at,
            delta=self._stored(version, encoded) if encoded else None,
            changed=encoded.changed if encoded else None,
        )
        answer = self._announce(manifest)
        if inspect.isawaitable(answer):
            asyncio.run(_settle(answer))
        self._transport.commit(manifest)
        return handed.snapshot

    def _stored(self, version: int, encoded: Encoded) -> Delta | None:
        if encoded.patches is None:
            return None
        return Delta(
            base_version=encoded.base_version,
            buckets=tuple(
                self._transport.write(version, len(patch), [Piece(0, memoryview(patch))])
                for patch in encoded.patches
            ),
        )


async def _settle(answer: Awaitable[None]) -> None:
    await answer


def _cut(snapshot: Snapshot, bucket_bytes: int) -> tuple[BucketPlan, list[list[Piece]]]:
    """Where every tensor of a snapshot goes, and the bytes of each bucket; nothing is copied."""
    plan = plan_buckets(
        (
            (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for name, tensor in snapshot.tensors
        ),
        bucket_bytes,
    )
    pieces: list[list[Piece]] = [[] for _ in plan.sizes]
    for spec, (_, tensor) in zip(plan.tensors, snapshot.tensors, strict=True):
        pieces[spec.bucket].append(Piece(spec.offset, bytes_of(tensor), spec))
    return plan, pieces

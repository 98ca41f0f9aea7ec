"""Publishes the weights of a policy version while the learner goes on.

    publish(v, tensors)     caller's thread      copies to host memory, then returns
        └─▶ background      plan ─▶ write and checksum ─▶ compare with v−1 ─▶ announce ─▶ commit
    publish(v+1, …)         never waits for v: two sets of host memory take turns
    publish(v+2, …)         takes the place of v+1 if that one still waits: the newest wins

Nothing is announced before every byte of it can be read. Receivers that have staged a version
hold its memory themselves, so the publisher keeps only the newest one.
"""

import asyncio
import inspect
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

import torch
from torch import Tensor

from weight_sync.buckets import BucketPlan, plan_buckets
from weight_sync.codecs.delta_encoder import DeltaEncoder, Encoded
from weight_sync.errors import DeadlineExceeded, PublishFailed, VersionOrderError
from weight_sync.manifest import Delta, Manifest
from weight_sync.snapshot import Snapshot
from weight_sync.transport import Piece, Transport

Announce = Callable[[Manifest], Awaitable[None] | None]
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Handed:
    """A version between `publish` and its announcement."""

    version: int
    snapshot: Snapshot
    created_at: float


class Publisher:
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
        self._transport = transport
        self._announce = announce
        self._bucket_bytes = bucket_bytes
        self._timeout = timeout
        self._encoder = DeltaEncoder() if codec == "delta" else None
        self._wire_dtype = wire_dtype
        self._changed = threading.Condition()
        self._idle: list[Snapshot] = []
        self._waiting: _Handed | None = None
        self._sending: _Handed | None = None
        self._sending_since = 0.0
        self._failed: tuple[int, BaseException] | None = None
        self._closing = False
        self._thread: threading.Thread | None = None
        self.version: int | None = None
        """The version handed over last."""
        self.skipped = 0
        """Versions that a newer one overtook before they were sent; nobody was told of them."""

    def publish(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> str:
        """Takes a copy of all tensors and lets them change again when it returns.

        Args:
            version: Above the last one.
            tensors: Names and tensors of any device and layout, as in the model folder.

        Returns:
            The `checksum` of what travels.

        Raises:
            VersionOrderError: The version is not above the last one.
            PublishFailed: An earlier version could not be stored or announced.
            DeadlineExceeded: An earlier version still is not announced.
        """
        created_at = time.time()
        if self.version is not None and version <= self.version:
            raise VersionOrderError(
                f"version {version} cannot follow version {self.version}: versions only grow"
            )
        snapshot = self._free_snapshot(version)
        digest = snapshot.take(tensors, self._wire_dtype)
        with self._changed:
            self._waiting = _Handed(version, snapshot, created_at)
            self.version = version
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="publish-weights", daemon=True)
            self._thread.start()
        return digest

    def flush(self, timeout: float) -> None:
        """Waits until the last version is announced.

        Raises:
            PublishFailed: A version could not be stored or announced.
            DeadlineExceeded: It was not announced in `timeout` seconds.
        """
        with self._changed:
            announced = self._changed.wait_for(
                lambda: self._failed or not (self._waiting or self._sending), timeout
            )
            self._raise_failure()
            if not announced:
                late = self._sending or self._waiting
                raise DeadlineExceeded(
                    f"version {late.version if late else None} was not announced within {timeout} s"
                )

    def close(self) -> None:
        """Ends after the version that is being sent, and gives the memory of all versions back."""
        with self._changed:
            self._closing, self._waiting = True, None
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(self._timeout)
        self._transport.close()
        self._idle.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _free_snapshot(self, version: int) -> Snapshot:
        """Host memory that nobody reads; that of a version which waits in vain, if need be."""
        with self._changed:
            self._raise_failure()
            late = self._sending
            if late and time.monotonic() - self._sending_since > self._timeout:
                raise DeadlineExceeded(
                    f"version {late.version} was not announced within {self._timeout} s"
                )
            overtaken, self._waiting = self._waiting, None
            if overtaken is None:
                return self._idle.pop() if self._idle else Snapshot()
            self.skipped += 1
            log.warning("version %d was overtaken by %d, not sent", overtaken.version, version)
            return overtaken.snapshot

    def _raise_failure(self) -> None:
        failed, self._failed = self._failed, None
        if failed is not None:
            version, error = failed
            raise PublishFailed(f"publishing version {version} failed: {error}") from error

    def _run(self) -> None:
        """Background: sends what waits, one version after the other."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if self._closing:
                    return
                handed = self._sending = self._waiting
                self._waiting, self._sending_since = None, time.monotonic()
            assert handed is not None
            failed = None
            try:
                self._send(handed)
            except BaseException as error:  # noqa: BLE001  (raised, typed, by the next call)
                failed = handed.version, error
            with self._changed:
                self._failed = self._failed or failed
                self._sending = None
                self._idle.append(handed.snapshot)
                self._changed.notify_all()

    def _send(self, handed: _Handed) -> None:
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
        memory = tensor.reshape(-1).view(torch.uint8).numpy().data
        pieces[spec.bucket].append(Piece(spec.offset, memory, spec))
    return plan, pieces

"""Publishes the weights of a policy version while the learner goes on.

    publish(v, tensors)          caller's thread     copies to host memory, then returns
        └─▶ background thread    plan ─▶ write and checksum ─▶ manifest ─▶ announce ─▶ retire v−1
    publish(v+1, …)              waits for the background of v first, and raises what failed there

Nothing is announced before every byte of it can be read. Receivers that have staged a version
hold its memory themselves, so the publisher keeps only the newest one.
"""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from weight_sync.buckets import plan_buckets
from weight_sync.checksum import checksum
from weight_sync.errors import DeadlineExceeded, PublishFailed, VersionOrderError
from weight_sync.manifest import Manifest
from weight_sync.transport import Transport

Announce = Callable[[Manifest], Awaitable[None] | None]


class Publisher:
    """Stores versions in a transport and announces them. Calls come from one thread at a time.

    Args:
        transport: Where buckets are kept; closed with the publisher.
        announce: Told of each complete version, from the background thread. What it returns is
            awaited there, in an event loop of its own.
        bucket_bytes: Size of one bucket.
        timeout: Seconds that `publish` waits for the version before it.
    """

    def __init__(
        self,
        transport: Transport,
        announce: Announce,
        bucket_bytes: int = 64 * 2**20,
        *,
        timeout: float = 60.0,
    ) -> None:
        self._transport = transport
        self._announce = announce
        self._bucket_bytes = bucket_bytes
        self._timeout = timeout
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publish-weights")
        self._running: Future[None] | None = None
        self._snapshot: dict[str, Tensor] = {}
        self.version: int | None = None
        """The version handed over last."""

    def publish(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> str:
        """Takes a copy of all tensors and lets them change again when it returns.

        Args:
            version: Above the last one.
            tensors: Names and tensors of any device and layout, as in the model folder.

        Returns:
            Their `checksum`.

        Raises:
            VersionOrderError: The version is not above the last one.
            PublishFailed: The version before could not be stored or announced.
            DeadlineExceeded: The version before still is not announced.
        """
        created_at = time.time()
        if self.version is not None and version <= self.version:
            raise VersionOrderError(
                f"version {version} cannot follow version {self.version}: versions only grow"
            )
        self.flush(self._timeout)
        snapshot = self._copy_to_host(tensors)
        self.version = version
        self._running = self._thread.submit(self._store, version, snapshot, created_at)
        return checksum(snapshot)

    def flush(self, timeout: float) -> None:
        """Waits until the last version is announced.

        Raises:
            PublishFailed: It could not be stored or announced.
            DeadlineExceeded: It was not announced in `timeout` seconds.
        """
        if self._running is None:
            return
        try:
            self._running.result(timeout)
        except FutureTimeoutError as error:
            if not self._running.done():
                raise DeadlineExceeded(
                    f"version {self.version} was not announced within {timeout} s"
                ) from None
            self._fail(error)
        except Exception as error:  # noqa: BLE001  (whatever failed there is raised here, typed)
            self._fail(error)
        self._running = None

    def close(self) -> None:
        """Waits for the background thread and gives the memory of all versions back."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._transport.close()
        self._snapshot.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _fail(self, error: BaseException) -> None:
        self._running = None
        raise PublishFailed(f"publishing version {self.version} failed: {error}") from error

    @torch.no_grad()
    def _copy_to_host(self, tensors: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Copies into the host tensors of the last version where they fit: no fresh pages."""
        snapshot = []
        for name, tensor in tensors:
            host = self._snapshot.get(name)
            if host is None or host.shape != tensor.shape or host.dtype != tensor.dtype:
                host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                self._snapshot[name] = host
            host.copy_(tensor)
            snapshot.append((name, host))
        return snapshot

    def _store(self, version: int, snapshot: list[tuple[str, Tensor]], created_at: float) -> None:
        """Background: everything between the snapshot and the announcement."""
        plan = plan_buckets(
            ((name, _dtype_name(tensor), tuple(tensor.shape)) for name, tensor in snapshot),
            self._bucket_bytes,
        )
        memory = {name: _bytes_of(tensor) for name, tensor in snapshot}
        pieces: list[list[tuple[int, memoryview]]] = [[] for _ in plan.sizes]
        for spec in plan.tensors:
            pieces[spec.bucket].append((spec.offset, memory[spec.name]))
        buckets = tuple(
            self._transport.write(version, nbytes, parts)
            for nbytes, parts in zip(plan.sizes, pieces, strict=True)
        )
        manifest = Manifest(
            version=version,
            codec="full",
            tensors=plan.tensors,
            buckets=buckets,
            created_at=created_at,
        )
        answer = self._announce(manifest)
        if inspect.isawaitable(answer):
            asyncio.run(_settle(answer))
        self._transport.retire(before=version)


async def _settle(answer: Awaitable[None]) -> None:
    await answer


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, not copied."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data

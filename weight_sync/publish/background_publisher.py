"""Takes weights from the learner and has a thread send them: what all ways of sending share.

publish(v, tensors)     caller's thread      copies to host memory, then returns
    └─▶ background      sends v, as a subclass knows how
publish(v+1, …)         never waits for v: two sets of host memory take turns
publish(v+2, …)         takes the place of v+1 if that one still waits: the newest wins
"""

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from weight_sync.errors import DeadlineExceeded, PublishFailed, VersionOrderError
from weight_sync.publish.snapshot import Snapshot

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PendingVersion:
    """A version between `publish` and its end."""

    version: int
    snapshot: Snapshot
    created_at: float
    """Epoch seconds of the call of `publish`."""


def check_follows(version: int, last: int | None) -> None:
    """Refuses a version that is not above the last one.

    Raises:
        VersionOrderError: It is not.
    """
    if last is not None and version <= last:
        raise VersionOrderError(
            f"version {version} cannot follow version {last}: versions only grow"
        )


class BackgroundPublisher(ABC):
    """Sends versions in the background. Calls come from one thread at a time.

    Args:
        timeout: Seconds from a `publish` to its end after which the next one fails, and that
            `close` waits.
        wire_dtype: What every tensor is cast to before it travels; None: to nothing.
    """

    idle_seconds: float | None = None
    """How often `_between` is called while no version waits; None: never."""

    def __init__(self, *, timeout: float, wire_dtype: torch.dtype | None) -> None:
        self._timeout = timeout
        self._wire_dtype = wire_dtype
        self._changed = threading.Condition()
        self._idle: list[Snapshot] = []
        self._waiting: PendingVersion | None = None
        self._sending: PendingVersion | None = None
        self._sending_since = 0.0
        self._failed: tuple[int, BaseException] | None = None
        self._closing = False
        self._thread: threading.Thread | None = None
        self.version: int | None = None
        """The version handed over last."""
        self.skipped = 0
        """Versions that a newer one overtook before they were sent; nobody was told of them."""

    @abstractmethod
    def _send(self, handed: PendingVersion) -> Snapshot | None:
        """Background: sends a version; the snapshot that nobody reads any more, if there is one."""

    def _between(self) -> None:  # noqa: B027  (most have nothing to do)
        """Background: what is done every `idle_seconds`."""

    def _late(self, sending: PendingVersion) -> str | None:
        """What to say of a version that is being sent for too long; None while it is not."""
        if time.monotonic() - self._sending_since <= self._timeout:
            return None
        return f"version {sending.version} was not announced within {self._timeout} s"

    @abstractmethod
    def _close(self) -> None:
        """Gives back what sending holds, when the thread has ended or did not end in time."""

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
        check_follows(version, self.version)
        snapshot = self._free_snapshot(version)
        digest = snapshot.take(tensors, self._wire_dtype)
        with self._changed:
            self._waiting = PendingVersion(version, snapshot, created_at)
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
        self._close()
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
            if self._sending and (late := self._late(self._sending)):
                raise DeadlineExceeded(late)
            overtaken, self._waiting = self._waiting, None
            if overtaken is None:
                return self._idle.pop() if self._idle else Snapshot()
            self.skipped += 1
            log.warning("version %d was overtaken by %d, not sent", overtaken.version, version)
            return overtaken.snapshot

    def _give_back(self, snapshot: Snapshot) -> None:
        """Background: the next version may be copied to this memory."""
        with self._changed:
            self._idle.append(snapshot)

    def _raise_failure(self) -> None:
        failed, self._failed = self._failed, None
        if failed is not None:
            version, error = failed
            raise PublishFailed(f"publishing version {version} failed: {error}") from error

    def _run(self) -> None:
        """Background: sends what waits, one version after the other."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing, self.idle_seconds)
                if self._closing:
                    return
                handed = self._sending = self._waiting
                self._waiting, self._sending_since = None, time.monotonic()
            failed, free = None, None
            try:
                if handed is None:
                    self._between()
                else:
                    free = self._send(handed)
            except BaseException as error:  # noqa: BLE001  (raised, typed, by the next call)
                failed = (-1 if self.version is None else self.version), error
                if handed is not None:
                    failed, free = (handed.version, error), handed.snapshot
            with self._changed:
                self._failed = self._failed or failed
                self._sending = None
                if free is not None:
                    self._idle.append(free)
                self._changed.notify_all()

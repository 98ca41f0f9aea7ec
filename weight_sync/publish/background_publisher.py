"""Base class of publishers, which copy weights for the learner and send them from a thread.

publish(v, tensors)     caller's thread      copies to host memory, then returns
    ├─▶ background      sends v, by the method of the subclass
    └─▶ checksum        of what was copied; the acknowledgement of v waits for it
publish(v+1, …)         never waits for v: two sets of host memory take turns
publish(v+2, …)         replaces v+1 if that is still waiting: the newest wins
"""

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from headway import clock
from weight_sync.adapter import AdapterForm
from weight_sync.errors import DeadlineExceeded, PublishFailed, VersionOrderError
from weight_sync.progress import Progress
from weight_sync.publish.snapshot import Snapshot

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PendingVersion:
    """A version that was published and not yet sent."""

    version: int
    snapshot: Snapshot
    created_at: float
    """Epoch seconds of the call of `publish`."""
    adapter: AdapterForm | None
    """None if the snapshot holds all weights."""


class BackgroundPublisher(ABC):
    """Sends versions in the background. Calls come from one thread at a time.

    Args:
        timeout: Seconds without progress of a version after which the next `publish` fails, beside
            what its bytes take (`weight_sync.progress`); also the deadline of `close`.
        wire_dtype: Dtype that every tensor is cast to before it is sent; None casts nothing.
        idle_seconds: Interval of `on_idle`; None never calls it.
    """

    def __init__(
        self, *, timeout: float, wire_dtype: torch.dtype | None, idle_seconds: float | None = None
    ) -> None:
        self._timeout = self._patience = timeout
        self._progress = Progress(timeout)
        """The progress of the version that is being sent."""
        self._wire_dtype = wire_dtype
        self._idle_seconds = idle_seconds
        self._changed = threading.Condition()
        self._free: list[Snapshot] = []
        self._waiting: PendingVersion | None = None
        self._sending: PendingVersion | None = None
        self._failure: tuple[int, BaseException] | None = None
        self._closing = False
        self._thread: threading.Thread | None = None
        self.version: int | None = None
        """The version published last."""
        self.skipped = 0
        """Versions that a newer one replaced before they were sent."""

    @abstractmethod
    def _send(self, pending: PendingVersion) -> Snapshot | None:
        """Send a version, in the background; return the snapshot that is free again, if any."""

    def announce_again(self) -> None:  # noqa: B027  (engines are sent to without announcements)
        """Announce the newest version again, to a broadcaster that does not have it any more."""

    def on_idle(self) -> None:  # noqa: B027  (most publishers have nothing to do)
        """Do periodic work while no version waits, in the background."""

    def _check_progress(self, pending: PendingVersion, patience: float) -> None:
        """Raise DeadlineExceeded if a version has made no progress for `patience` seconds."""
        if late := self._progress.late(patience):
            raise DeadlineExceeded(f"version {pending.version} was not announced {late}")

    @abstractmethod
    def _close(self) -> None:
        """Release resources; called when the thread has ended or did not end in time."""

    def publish(
        self,
        version: int,
        tensors: Iterable[tuple[str, Tensor]],
        adapter: AdapterForm | None = None,
    ) -> Future[str]:
        """Copy all tensors, of any device and layout, and send them in the background.

        Returns once they are copied, and may change again; the future has the checksum of them as
        sent (`Snapshot.take`), which may come after the engines have them. Their names are those of
        the model folder, or of an `adapter`'s factors, which only a staged publisher sends.

        Raises:
            VersionOrderError: The version is not above the previous one.
            PublishFailed: An earlier version failed.
            DeadlineExceeded: An earlier version is still being sent.
        """
        created_at = clock.now()
        if self.version is not None and version <= self.version:
            raise VersionOrderError(
                f"version {version} cannot follow version {self.version}: versions only grow"
            )
        snapshot = self._free_snapshot(version)
        digest = snapshot.take(tensors, self._wire_dtype)
        with self._changed:
            if self._sending is None:
                self._progress.reach("it waits to be sent")
            self._waiting = PendingVersion(version, snapshot, created_at, adapter)
            self.version = version
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="publish-weights", daemon=True)
            self._thread.start()
        return digest

    def flush(self, timeout: float) -> None:
        """Wait until the last version is sent; raise PublishFailed if one failed.

        Raises DeadlineExceeded if there is no progress for `timeout` seconds.
        """
        with self._changed:
            while not self._failure and (pending := self._sending or self._waiting):
                self._check_progress(pending, timeout)
                self._changed.wait(self._progress.remaining(timeout))
            self._raise_failure()

    def close(self) -> None:
        """Finish the version that is being sent, then release the memory of all versions."""
        with self._changed:
            self._closing, self._waiting = True, None
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(self._timeout)
        self._close()
        self._free.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _free_snapshot(self, version: int) -> Snapshot:
        """Return host memory that nobody reads, if need be that of a version not yet sent."""
        with self._changed:
            self._raise_failure()
            if self._sending:
                self._check_progress(self._sending, self._patience)
            replaced, self._waiting = self._waiting, None
            if replaced is None:
                return self._free.pop() if self._free else Snapshot()
            self.skipped += 1
            log.warning("version %d was overtaken by %d, not sent", replaced.version, version)
            return replaced.snapshot

    def _give_back(self, snapshot: Snapshot) -> None:
        """Allow the next version to be copied to this memory; called in the background."""
        with self._changed:
            self._free.append(snapshot)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            (version, error), self._failure = self._failure, None
            raise PublishFailed(f"publishing version {version} failed: {error}") from error

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing, self._idle_seconds)
                if self._closing:
                    return
                pending = self._sending = self._waiting
                self._progress.reach("it is about to be sent")
                self._waiting = None
            failure, free = None, pending.snapshot if pending else None
            try:
                if pending is None:
                    self.on_idle()
                else:
                    free = self._send(pending)
            except BaseException as error:  # noqa: BLE001  (raised, typed, by the next call)
                newest = -1 if self.version is None else self.version
                failure = (pending.version if pending else newest), error
            with self._changed:
                self._failure = self._failure or failure
                self._sending = None
                if free is not None:
                    self._free.append(free)
                self._changed.notify_all()

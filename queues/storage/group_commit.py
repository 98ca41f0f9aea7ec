"""Group commit: one thread writes a store, and changes that arrive together share one commit.

    event loop ──submit──▶ queue ──▶ thread:  begin · every change in the queue · commit
        ▲                                                                           │
        └────────────────────────── futures resolve ◀───────────────────────────────┘

Changes are committed in the order of their submission. If the disk is full, the thread waits and
tries the same changes again. After any other failure nothing more is committed or answered: the
broker has to be started again from what is on disk.
"""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from headway.full_disk import PROBE_BYTES, why_unwritable
from queues.errors import LedgerError, QueueClosed
from queues.storage.journal import Journal
from queues.storage.ledger import Ledger
from queues.storage.pause import Pause

T = TypeVar("T")
Change = tuple[Callable[[], Any], "asyncio.Future[Any]"]


class GroupCommit:
    """The writer of a store, which it owns.

    A commit waits `interval` seconds for more changes; a full disk is probed every `probe_seconds`.
    """

    def __init__(self, store: Ledger | Journal, *, interval: float, probe_seconds: float) -> None:
        self._store = store
        self._interval = interval
        self._changes: queue.SimpleQueue[Change | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self.pause = Pause(f"the disk of {store.directory}", store.directory, probe_seconds)
        self.failure: LedgerError | None = None
        """Error after which nothing more is committed; set in the thread."""
        name = f"{type(store).__name__.lower()}-writer"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, change: Callable[[], T]) -> "asyncio.Future[T]":
        """Run `change` in the thread; the future has its result once it is durable."""
        if self.failure is not None:
            raise self.failure
        if self._closing.is_set():
            raise QueueClosed("the broker is closed")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._changes.put((change, future))
        return future

    async def close(self) -> None:
        """Commit all submitted changes, then close the store."""
        if not self._closing.is_set():
            self._closing.set()
            self._changes.put(None)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        is_open = True
        while is_open:
            changes, is_open = self._gather()
            if changes:
                with self.pause.writing():
                    self._commit(changes)
        with contextlib.suppress(OSError):  # after a failed commit the disk may refuse this too
            self._store.close()

    def _gather(self) -> tuple[list[Change], bool]:
        """Return the changes of the next commit, and False if they are the last."""
        change = self._changes.get()
        changes: list[Change] = []
        until = time.monotonic() + self._interval
        while change is not None:
            changes.append(change)
            try:
                change = self._changes.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                return changes, True
        return changes, False

    def _commit(self, changes: list[Change]) -> None:
        """Make changes durable, however long the disk is full, and resolve their futures."""
        size = PROBE_BYTES
        while True:
            try:
                results = self._try(changes)
            except Exception as error:  # noqa: BLE001  (after any error nothing is durable)
                waits = self.failure is None
                if waits and self.pause.wait_for_space(error, self._closing, size):
                    size *= 2  # if it fails again, that was too little for these changes
                    continue
                if self.failure is None:
                    text = f"the commit failed, nothing more is accepted: {error!r}"
                    if why := why_unwritable(self._store.directory):
                        text = f"{self._store.directory} cannot be written: {why}; {text}"
                    self.failure = LedgerError(text)
                    self.failure.__cause__ = error
                _resolve(changes, asyncio.Future.set_exception, [self.failure] * len(changes))
            else:
                _resolve(changes, asyncio.Future.set_result, results)
            return

    def _try(self, changes: list[Change]) -> list[Any]:
        """Apply all changes in one transaction, or none of them."""
        if self.failure is not None:
            raise self.failure
        try:
            self._store.begin()
            results = [change() for change, _ in changes]
            self._store.commit()
        except Exception:
            with contextlib.suppress(Exception):
                self._store.rollback()
            raise
        return results


def _resolve(
    changes: list[Change],
    resolve: Callable[["asyncio.Future[Any]", Any], None],
    values: Sequence[Any],
) -> None:
    """Resolve the futures of all changes of a commit, which come from one event loop."""

    def deliver() -> None:
        for (_, future), value in zip(changes, values, strict=True):
            if not future.done():
                resolve(future, value)

    with contextlib.suppress(RuntimeError):  # the event loop ended before its broker was closed
        changes[0][1].get_loop().call_soon_threadsafe(deliver)

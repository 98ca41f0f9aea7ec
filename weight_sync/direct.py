"""Weights straight from the learner's GPU into paused engines, without staging (`staged = False`).

    send(v, tensors)   for every engine in turn:   pause ─▶ send ─▶ resume at v ─▶ report

For transports that write into an engine's own weights as they arrive (`vllm_sender`): nothing can
be verified before, so the pause covers the transfer. An engine whose transfer failed or did not end
in time is a mixture: it stays paused, its connection is given up, and every later `send` or `seed`
sends it all weights again over a new one, until one succeeds. Each engine has a connection of its
own, so that one which hangs holds nobody else up for longer than `timeout`. Leaves out how bytes
travel, how calls reach an engine, and who waits for all this (`direct_publisher`).
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from weight_sync.announcements import SwapReport
from weight_sync.errors import DeadlineExceeded, VersionOrderError

log = logging.getLogger(__name__)

Weights = Sequence[tuple[str, Tensor]]


class EngineLink(Protocol):
    """An engine as the learner reaches it. Every call blocks, and raises what went wrong."""

    engine_id: str
    workers: int
    """Processes that hold a part of its weights: its tensor-parallel size."""

    def pause(self, version: int) -> None:
        """Returns when no token is sampled any more; harmless on a paused engine."""
        ...

    def transfer(self, method: str, payload: dict[str, Any] | None) -> None:
        """Calls `method` of the engine's weight-transfer endpoint."""
        ...

    def resume(self, version: int) -> None:
        """Goes on; tokens carry `version` from here.

        Ignored if the engine was paused for another version since: a call that was given up and
        comes late must not wake it in the middle of the next transfer.
        """
        ...


class Sender(Protocol):
    """An open connection to one engine."""

    def send(self, weights: Weights) -> None:
        """Replaces every weight of the engine; returns when they are in place."""
        ...

    def close(self) -> None:
        """Gives the connection up; must not wait for the other side."""
        ...


class DirectEngines:
    """Sends versions to all engines while the caller waits. Calls come from one thread.

    Args:
        engines: Who is to be served now; asked at every version, so that an engine which was made
            again gets the next one.
        connect: Opens a connection. It runs under the deadline too.
        report: Told of every attempt.
        timeout: Deadline in seconds for one engine, connecting and pause included.
    """

    staged = False

    def __init__(
        self,
        engines: Callable[[], Sequence[EngineLink]],
        connect: Callable[[EngineLink, Weights], Sender],
        report: Callable[[SwapReport], None],
        *,
        timeout: float = 60.0,
    ) -> None:
        self._engines = engines
        self._connect = connect
        self._report = report
        self._timeout = timeout
        self._senders: dict[str, tuple[EngineLink, Sender]] = {}
        self._served: set[str] = set()
        self._published_at = 0.0
        self.version: int | None = None
        """The version sent last."""

    def send(
        self, version: int, weights: Weights, published_at: float | None = None
    ) -> list[SwapReport]:
        """Sends a version to all engines; the tensors may change again when it returns.

        Args:
            version: Above the last one.
            weights: Names and tensors as in the model folder.
            published_at: Epoch seconds of the call of `publish`; None: now.

        Returns:
            One report for each engine; an engine with an error stays paused.

        Raises:
            VersionOrderError: The version is not above the last one.
        """
        if self.version is not None and version <= self.version:
            raise VersionOrderError(
                f"version {version} cannot follow version {self.version}: versions only grow"
            )
        self.version = version
        self._published_at = time.time() if published_at is None else published_at
        return [self._serve(link, version, weights) for link in self._present()]

    def seed(self, weights: Weights) -> list[SwapReport]:
        """Sends the version of the last `send` to engines that it did not reach.

        Args:
            weights: The same as then.

        Returns:
            One report for each of them.
        """
        version = self.version
        if version is None:
            return []
        return [
            self._serve(link, version, weights)
            for link in self._present()
            if link.engine_id not in self._senders or self._senders[link.engine_id][0] is not link
        ]

    def close(self) -> None:
        """Gives all connections up."""
        for engine_id in list(self._senders):
            self._drop(engine_id)

    def _present(self) -> Sequence[EngineLink]:
        """Who is there; connections to others are given up."""
        engines = self._engines()
        for engine_id in self._senders.keys() - {link.engine_id for link in engines}:
            self._drop(engine_id)
        return engines

    def _serve(self, link: EngineLink, version: int, weights: Weights) -> SwapReport:
        known = self._senders.get(link.engine_id)
        if known is not None and known[0] is not link:
            self._drop(link.engine_id)  # another process under the name of the one before
        attempt = _Attempt(link, version, self._sender_of, weights)
        error = attempt.wait(self._timeout)
        if error is None and attempt.sender is not None:
            self._senders[link.engine_id] = (link, attempt.sender)
        else:
            self._drop(link.engine_id)
            attempt.give_up()
            log.warning("%s did not take version %d: %s", link.engine_id, version, error)
        report = SwapReport(
            engine_id=link.engine_id,
            version=version,
            published_at=self._published_at,
            staged_at=attempt.started_at,
            pause_seconds=attempt.pause,
            load_seconds=attempt.load,
            resume_seconds=attempt.resume,
            swap_started_at=attempt.started_at,
            swap_finished_at=None if error else time.time(),
            bytes=(nbytes := sum(tensor.nbytes for _, tensor in weights)),
            full_bytes=nbytes,
            seeding=link.engine_id not in self._served,
            error=None if error is None else f"{type(error).__name__}: {error}",
        )
        if error is None:
            self._served.add(link.engine_id)
        self._report(report)
        return report

    def _sender_of(self, link: EngineLink, weights: Weights) -> Sender:
        known = self._senders.get(link.engine_id)
        return known[1] if known else self._connect(link, weights)

    def _drop(self, engine_id: str) -> None:
        self._served.discard(engine_id)
        known = self._senders.pop(engine_id, None)
        if known is not None:
            known[1].close()


class _Attempt:
    """One engine taking one version, in a thread that may be left behind."""

    def __init__(
        self,
        link: EngineLink,
        version: int,
        sender_of: Callable[[EngineLink, Weights], Sender],
        weights: Weights,
    ) -> None:
        self._link, self._version = link, version
        self._sender_of, self._weights = sender_of, weights
        self.sender: Sender | None = None
        self.pause = self.load = self.resume = 0.0
        self.started_at = time.time()
        self._error: BaseException | None = None
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="send-weights", daemon=True)

    def wait(self, timeout: float) -> BaseException | None:
        """What went wrong, if anything did."""
        self._thread.start()
        self._thread.join(timeout)
        if self._thread.is_alive():
            return DeadlineExceeded(
                f"{self._link.engine_id} did not take version {self._version} within {timeout} s"
            )
        return self._error

    def give_up(self) -> None:
        """Closes the connection, now or when it has come about."""
        self._given_up.set()
        if self.sender is not None:
            self.sender.close()

    def _run(self) -> None:
        try:
            begin = time.perf_counter()
            self._link.pause(self._version)
            paused = time.perf_counter()
            self.pause = paused - begin
            self.sender = self._sender_of(self._link, self._weights)
            if self._given_up.is_set():
                self.sender.close()
                return
            self.sender.send(self._weights)
            sent = time.perf_counter()
            self.load = sent - paused
            if self._given_up.is_set():  # reported as failed: whatever came, it waits for a re-send
                return
            self._link.resume(self._version)
            self.resume = time.perf_counter() - sent
        except Exception as error:  # noqa: BLE001  (handed to the thread that waits)
            self._error = error

"""The direct publisher writes weights into paused engines without staging (`staged = False`).

    for every engine in turn:   pause ─▶ send ─▶ resume at v ─▶ report

An engine whose transfer failed or did not end in time holds a mixture. It ends, and nothing is sent
to it again. A hung engine delays the others by no more than its own deadline. Between versions the
publisher serves engines that joined or were replaced.
"""

import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from weight_sync import clock
from weight_sync.announcements import WeightUpdateReport
from weight_sync.errors import DeadlineExceeded, UpdateRefused
from weight_sync.publish.background_publisher import BackgroundPublisher, PendingVersion

log = logging.getLogger(__name__)

GIVEN_UP = -1

Weights = Sequence[tuple[str, Tensor]]

Call = Literal["pause", "transfer", "resume", "give_up"]
"""A method of `direct.receiver.DirectReceiver`, which documents arguments, results and errors."""


class EngineLink(Protocol):
    """The learner's connection to one engine's `DirectReceiver`."""

    engine_id: str
    workers: int
    """Processes that hold a part of its weights: its tensor-parallel size."""

    def call(self, method: Call, *arguments: Any) -> Any:
        """Call a method of the receiver; blocks, and raises what the method raises."""


Transfer = Callable[[str, dict[str, Any] | None], None]
"""`DirectReceiver.transfer` of the current attempt: method and payload."""


class Sender(Protocol):
    """An open connection to one engine."""

    def send(self, weights: Weights, transfer: Transfer) -> None:
        """Replace every weight of the engine; return once they are in place."""

    def close(self) -> None:
        """Close the connection and abort a running `send`; must not wait for the engine."""


Connect = Callable[[EngineLink, Weights, Transfer], Sender]
"""Opens a connection; the weights give names, dtypes and shapes of all that will be sent."""


class DirectPublisher(BackgroundPublisher):
    """Sends every version to every engine. Calls come from one thread at a time.

    Args:
        engines: Returns the present engines; called for every version.
        connect: Opens a connection, under the engine's deadline.
        report: Called with every attempt that paused an engine; one with an error ends the engine.
        timeout: Deadline in seconds for one engine, connecting and pause included.
        wire_dtype: See `BackgroundPublisher`.
        seed_seconds: Interval of `on_idle`.
    """

    def __init__(
        self,
        engines: Callable[[], Sequence[EngineLink]],
        connect: Connect,
        report: Callable[[WeightUpdateReport], None],
        *,
        timeout: float = 60.0,
        wire_dtype: torch.dtype | None = None,
        seed_seconds: float = 1.0,
    ) -> None:
        super().__init__(timeout=timeout, wire_dtype=wire_dtype, idle_seconds=seed_seconds)
        self._engines = engines
        self._connect = connect
        self._report = report
        self._senders: dict[EngineLink, Sender] = {}
        self._sent: dict[EngineLink, int] = {}
        """The version that each engine has taken last, or GIVEN_UP."""
        self._newest: PendingVersion | None = None
        """The version that engines without it are sent; its memory is not used again meanwhile."""
        self._closed = False

    def _send(self, pending: PendingVersion) -> None:
        previous, self._newest = self._newest, None  # a failed version is not to be sent again
        if previous is not None:
            self._give_back(previous.snapshot)
        self._seed(pending)
        self._newest = pending

    def on_idle(self) -> None:
        """Send the newest version to engines that joined or were replaced since."""
        if self._newest is not None:
            self._seed(self._newest)

    def _late(self, sending: PendingVersion) -> None:
        """Return None: each engine has a deadline of its own."""

    def _close(self) -> None:
        """Close all connections; an engine that is being sent to is the last."""
        self._closed = True
        for link in list(self._senders):
            self._drop(link)
        self._newest = None

    def _seed(self, pending: PendingVersion) -> None:
        """Send a version to the engines that lack it."""
        engines = self._engines()
        for link in self._sent.keys() - set(engines):
            self._drop(link)
            del self._sent[link]
        for link in engines:
            if not self._closed and self._sent.get(link) not in (pending.version, GIVEN_UP):
                self._serve(link, pending)

    def _serve(self, link: EngineLink, pending: PendingVersion) -> None:
        """Send a version to one engine and report it, unless the engine refuses."""
        version, weights = pending.version, pending.snapshot.tensors
        nbytes = sum(tensor.nbytes for _, tensor in weights)
        now = clock.now()
        report = WeightUpdateReport(
            engine_id=link.engine_id,
            version=version,
            published_at=pending.created_at,
            bytes=nbytes,
            full_bytes=nbytes,
            staged_at=now,
            swap_started_at=now,
        )
        attempt = _Attempt(link, weights, self._connect, self._senders.get(link), report)
        error = attempt.wait(self._timeout)
        if isinstance(error, UpdateRefused) and not attempt.begun:
            log.info("%s: %s", link.engine_id, error)
            return
        if error is None and attempt.sender is not None:
            self._senders[link], self._sent[link] = attempt.sender, version
            report = replace(attempt.report, swap_finished_at=clock.now())
        else:
            self._sent[link] = GIVEN_UP
            self._senders.pop(link, None)
            message = f"{type(error).__name__}: {error}"
            report = replace(attempt.report, error=message)
            attempt.give_up(message)
            log.warning("%s did not take version %d: %s", link.engine_id, version, error)
        self._report(report)

    def _drop(self, link: EngineLink) -> None:
        if sender := self._senders.pop(link, None):
            sender.close()


@dataclass(slots=True)
class _Attempt:
    """One engine taking one version, in a thread that is abandoned at the deadline."""

    _link: EngineLink
    _weights: Weights
    _connect: Connect
    sender: Sender | None
    report: WeightUpdateReport
    """The attempt so far."""
    begun: bool = False
    """True once the engine was paused."""
    _error: BaseException | None = None
    _token: str = field(default_factory=lambda: uuid.uuid4().hex)
    _given_up: threading.Event = field(default_factory=threading.Event)

    def wait(self, timeout: float) -> BaseException | None:
        """Run the attempt and return its error, None if it succeeded."""
        thread = threading.Thread(target=self._run, name="send-weights", daemon=True)
        thread.start()
        thread.join(timeout)
        if thread.is_alive():
            return DeadlineExceeded(
                f"{self._link.engine_id} did not take version {self.report.version} within "
                f"{timeout:g} s"
            )
        return self._error

    def give_up(self, reason: str) -> None:
        """End the engine, and the connection, also one that is still being opened."""
        self._given_up.set()
        if self.sender is not None:
            self.sender.close()
        try:
            self._link.call("give_up", reason)
        except Exception as error:  # noqa: BLE001  (it is gone, or ends by its own deadline)
            log.warning("%s cannot be reached to end it: %s", self._link.engine_id, error)

    def _run(self) -> None:
        try:
            begin = time.perf_counter()
            served = self._link.call("pause", self.report.version, self._token)
            self.begun = True
            paused = time.perf_counter()
            self.report = replace(self.report, seeding=served is None, pause_seconds=paused - begin)
            if self.sender is None:
                self.sender = self._connect(self._link, self._weights, self._transfer)
                if self._given_up.is_set():
                    self.sender.close()
            self.sender.send(self._weights, self._transfer)
            sent = time.perf_counter()
            self.report = replace(self.report, load_seconds=sent - paused)
            self._refuse_if_given_up()
            self._link.call("resume", self._token)
            self.report = replace(self.report, resume_seconds=time.perf_counter() - sent)
        except Exception as error:  # noqa: BLE001  (handed to the thread that waits)
            self._error = error

    def _transfer(self, method: str, payload: dict[str, Any] | None) -> None:
        self._refuse_if_given_up()
        self._link.call("transfer", self._token, method, payload)

    def _refuse_if_given_up(self) -> None:
        if self._given_up.is_set():
            raise UpdateRefused(f"{self._link.engine_id} was given up")

"""Weights straight from the learner's GPU into paused engines, without staging (`staged = False`).

    send(v, tensors)   for every engine in turn:   pause ─▶ send ─▶ resume at v ─▶ report

For transports that write into an engine's own weights as they arrive (`vllm_sender`): nothing can
be verified before, so the pause covers the transfer. An engine whose transfer failed or did not end
in time is a mixture, and nothing is sent to it again: it is told so, ends (`direct_receiver`), is
made again, and `seed` finds it. Each engine has a connection and a deadline of its own, so that one
which hangs holds nobody else up for longer. Leaves out how bytes travel, how calls reach an engine,
and who waits for all this (`direct_publisher`).
"""

import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from weight_sync.announcements import WeightUpdateReport
from weight_sync.errors import DeadlineExceeded, NotNow
from weight_sync.publish.background_publisher import check_follows

log = logging.getLogger(__name__)

GIVEN_UP = -1

Weights = Sequence[tuple[str, Tensor]]


class EngineLink(Protocol):
    """An engine as the learner reaches it. Every call blocks, and raises what went wrong."""

    engine_id: str
    workers: int
    """Processes that hold a part of its weights: its tensor-parallel size."""

    def pause(self, version: int, attempt: str) -> int | None:
        """Returns, when no token is sampled any more, the version that was served, if any was.

        Args:
            version: What is to come.
            attempt: A token that no other attempt has; the calls that follow must carry it.

        Raises:
            NotNow: The engine goes on as it is.
        """
        ...

    def transfer(self, attempt: str, method: str, payload: dict[str, Any] | None) -> None:
        """Calls `method` of the engine's weight-transfer endpoint.

        Raises:
            NotNow: The attempt is over; nothing was written.
        """
        ...

    def resume(self, attempt: str) -> None:
        """Goes on; tokens carry the version that the attempt brought from here.

        Raises:
            NotNow: The attempt is over; the engine does not go on.
        """
        ...

    def give_up(self, why: str) -> None:
        """Has the engine end: it is a mixture, or did not answer in time."""
        ...


Transfer = Callable[[str, dict[str, Any] | None], None]
"""`EngineLink.transfer` of the attempt that is under way: method and payload."""


class Sender(Protocol):
    """An open connection to one engine."""

    def send(self, weights: Weights, transfer: Transfer) -> None:
        """Replaces every weight of the engine; returns when they are in place."""
        ...

    def close(self) -> None:
        """Gives the connection up, and a `send` that is under way; must not wait for the engine."""
        ...


Connect = Callable[[EngineLink, Weights, Transfer], Sender]
"""Opens a connection; the weights tell names, dtypes and shapes of all that will be sent."""


class DirectEngines:
    """Sends versions to all engines while the caller waits. Calls come from one thread.

    Args:
        engines: Who is to be served now; asked at every version, so that an engine which was made
            again gets the next one.
        connect: Opens a connection. It runs under the deadline too.
        report: Told of every attempt that has begun.
        timeout: Deadline in seconds for one engine, connecting and pause included.
    """

    def __init__(
        self,
        engines: Callable[[], Sequence[EngineLink]],
        connect: Connect,
        report: Callable[[WeightUpdateReport], None],
        *,
        timeout: float = 60.0,
    ) -> None:
        self._engines = engines
        self._connect = connect
        self._report = report
        self._timeout = timeout
        self._senders: dict[EngineLink, Sender] = {}
        self._brought: dict[EngineLink, int] = {}
        """The version that each engine has taken last, or GIVEN_UP."""
        self._published_at = 0.0
        self._closed = False
        self.version: int | None = None
        """The version sent last."""
        self.serving: tuple[str, float] | None = None
        """The engine that is sent to, and since when by the monotonic clock."""

    def send(
        self, version: int, weights: Weights, published_at: float | None = None
    ) -> list[WeightUpdateReport]:
        """Sends a version to all engines; the tensors may change again when it returns.

        Args:
            version: Above the last one.
            weights: Names and tensors as in the model folder.
            published_at: Epoch seconds of the call of `publish`; None: now.

        Returns:
            One report for each engine that was touched; one with an error ends.

        Raises:
            VersionOrderError: The version is not above the last one.
        """
        check_follows(version, self.version)
        self.version = version
        self._published_at = time.time() if published_at is None else published_at
        return self.seed(weights)

    def seed(self, weights: Weights) -> list[WeightUpdateReport]:
        """Sends the version of the last `send` to engines that do not have it.

        Args:
            weights: The same as then.

        Returns:
            One report for each of them that was touched.
        """
        version = self.version
        if version is None:
            return []
        engines = self._engines()
        for link in self._brought.keys() - set(engines):
            self._drop(link)
            del self._brought[link]
        reports = []
        for link in engines:
            if self._closed or self._brought.get(link) in (version, GIVEN_UP):
                continue
            report = self._serve(link, version, weights)
            if report is not None:
                reports.append(report)
        return reports

    def close(self) -> None:
        """Gives all connections up; an engine that is being sent to is the last."""
        self._closed = True
        for link in list(self._senders):
            self._drop(link)

    def _serve(self, link: EngineLink, version: int, weights: Weights) -> WeightUpdateReport | None:
        """Brings a version to an engine; None if it did not let that begin."""
        attempt = _Attempt(link, version, weights, self._connect, self._senders.get(link))
        self.serving = link.engine_id, time.monotonic()
        error = attempt.wait(self._timeout)
        self.serving = None
        if isinstance(error, NotNow) and not attempt.begun:
            log.info("%s: %s", link.engine_id, error)
            return None
        if error is None and attempt.sender is not None:
            self._senders[link], self._brought[link] = attempt.sender, version
        else:
            self._brought[link] = GIVEN_UP
            self._senders.pop(link, None)
            attempt.give_up(f"{type(error).__name__}: {error}")
            log.warning("%s did not take version %d: %s", link.engine_id, version, error)
        report = WeightUpdateReport(
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
            seeding=attempt.seeding,
            error=None if error is None else f"{type(error).__name__}: {error}",
        )
        self._report(report)
        return report

    def _drop(self, link: EngineLink) -> None:
        sender = self._senders.pop(link, None)
        if sender is not None:
            sender.close()


class _Attempt:
    """One engine taking one version, in a thread that may be left behind."""

    def __init__(
        self,
        link: EngineLink,
        version: int,
        weights: Weights,
        connect: Connect,
        sender: Sender | None,
    ) -> None:
        self._link, self._version = link, version
        self._connect, self._weights = connect, weights
        self._token = uuid.uuid4().hex
        self.sender = sender
        self.begun = False
        """Whether the engine was paused."""
        self.seeding = False
        """Whether it served nothing before."""
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
                f"{self._link.engine_id} did not take version {self._version} within {timeout:g} s"
            )
        return self._error

    def give_up(self, why: str) -> None:
        """Ends the engine, and the connection, now or when it has come about."""
        self._given_up.set()
        if self.sender is not None:
            self.sender.close()
        try:
            self._link.give_up(why)
        except Exception as error:  # noqa: BLE001  (it is gone, or ends by its own deadline)
            log.warning("%s could not be told that it is given up: %s", self._link.engine_id, error)

    def _run(self) -> None:
        try:
            begin = time.perf_counter()
            served = self._link.pause(self._version, self._token)
            self.begun, self.seeding = True, served is None
            paused = time.perf_counter()
            self.pause = paused - begin
            if self.sender is None:
                self.sender = self._connect(self._link, self._weights, self._transfer)
                if self._given_up.is_set():
                    self.sender.close()
            self.sender.send(self._weights, self._transfer)
            sent = time.perf_counter()
            self.load = sent - paused
            self._refuse_if_given_up()
            self._link.resume(self._token)
            self.resume = time.perf_counter() - sent
        except Exception as error:  # noqa: BLE001  (handed to the thread that waits)
            self._error = error

    def _transfer(self, method: str, payload: dict[str, Any] | None) -> None:
        self._refuse_if_given_up()
        self._link.transfer(self._token, method, payload)

    def _refuse_if_given_up(self) -> None:
        if self._given_up.is_set():
            raise NotNow(f"{self._link.engine_id} was given up")

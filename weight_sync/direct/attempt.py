"""One attempt to bring a version to a group of engines that take it together.

    pause each ─▶ connect, unless they share a connection ─▶ send to all ─▶ resume each

Only in the transfer does a failure of one fail all: the others hold mixtures, and their receives
cannot be ended from outside.
"""

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from headway import clock
from weight_sync.announcements import WeightUpdateReport
from weight_sync.errors import DeadlineExceeded, LoadFailed, UpdateRefused
from weight_sync.progress import Progress
from weight_sync.publish.background_publisher import PendingVersion

log = logging.getLogger(__name__)

IN_FLIGHT_BYTES = 3 * 256 * 2**20
"""Bytes that a sender may have taken and not yet delivered."""

Weights = Sequence[tuple[str, Tensor]]


class EngineLink(Protocol):
    """The learner's connection to one engine; blocks, and raises what `DirectReceiver` raises."""

    engine_id: str
    workers: int
    """Processes that hold a part of its weights: its tensor-parallel size."""

    def pause(self, version: int, attempt: str) -> int | None:
        """Pause sampling; return the version served before, if any."""

    def transfer(self, attempt: str, method: str, payload: dict[str, Any] | None) -> None:
        """Call a method of the engine's weight-transfer endpoint."""

    def resume(self, attempt: str) -> None:
        """Resume sampling at the version of the attempt."""

    def give_up(self, reason: str) -> None:
        """End the engine."""


Transfer = Callable[[str, Sequence[dict[str, Any] | None]], None]
"""`DirectReceiver.transfer` of every engine of the group: method, and the payload of each."""


class Sender(Protocol):
    """An open connection to a group of engines."""

    def send(self, weights: Weights, transfer: Transfer) -> None:
        """Replace every weight of the engines; return once they are in place."""

    def close(self) -> None:
        """Close the connection and abort a running `send`; must not wait for an engine."""


Connect = Callable[[Sequence[EngineLink], Weights, Transfer], Sender]
"""Opens a connection; the weights give names, dtypes and shapes of all that will be sent."""


@dataclass(frozen=True, eq=False)
class Group:
    """Engines that share a connection."""

    engines: Sequence[EngineLink]
    sender: Sender


class _Weights(list[tuple[str, Tensor]]):
    """The tensors of a version; a sender that takes the next one has made progress."""

    def __init__(self, weights: Weights, progress: Progress) -> None:
        super().__init__(weights)
        self._progress = progress
        self.nbytes = sum(tensor.nbytes for _, tensor in weights)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for number, item in enumerate(super().__iter__()):
            self.reach(f"{number} of {len(self)} tensors are sent")
            yield item

    def reach(self, step: str) -> None:
        """Report a step of the transfer."""
        self._progress.reach(step, min(self.nbytes, IN_FLIGHT_BYTES))


class Attempt:
    """A group of engines taking one version, in threads that are abandoned at the deadline."""

    def __init__(
        self,
        members: Sequence[EngineLink],
        pending: PendingVersion,
        connect: Connect,
        groups: Mapping[EngineLink, Group],
        progress: Progress,
    ) -> None:
        self.group: Group | None = None
        """The connection that is used; a new one if not exactly these engines share one."""
        self.errors: dict[EngineLink, BaseException] = {}
        """The engines that failed, or were paused when another one failed."""
        self._version = pending.version
        self._connect, self._groups, self._progress = connect, groups, progress
        self._weights = _Weights(pending.snapshot.tensors, progress)
        self._token = uuid.uuid4().hex
        self._changed = threading.Condition()
        self._ended = False
        self._ready: list[EngineLink] = []
        """The engines that are paused."""
        self._unanswered: set[EngineLink] = set()
        self._apart = False
        """True while the engines do not depend on each other: before and after the transfer."""
        now = clock.now()
        report = WeightUpdateReport(
            engine_id="", version=pending.version, published_at=pending.created_at,
            bytes=self._weights.nbytes, full_bytes=self._weights.nbytes, staged_at=now,
            swap_started_at=now,
        )  # fmt: skip
        self.reports = {link: replace(report, engine_id=link.engine_id) for link in members}
        """The attempt so far, of all engines but those that refused."""

    def wait(self) -> None:
        """Run the attempt; return when it has ended, failed, or makes no progress."""
        self._progress.reach("they were asked to pause")
        threading.Thread(target=self._run, name="send-weights", daemon=True).start()
        with self._changed:
            while not self._changed.wait_for(lambda: self._ended, self._progress.remaining()):
                if late := self._progress.late():
                    self._stall(late)

    def _stall(self, late: str) -> None:
        """Fail the engines that did not answer, or all of them if they depend on each other."""
        silent = ", ".join(sorted(link.engine_id for link in self._unanswered)) or "the sender"
        error = DeadlineExceeded(
            f"version {self._version} was not taken {late}; no answer from {silent}"
        )
        if not (self._apart and self._unanswered):
            self._fail(error)
        self.errors |= {link: error for link in self._unanswered if link not in self.errors}
        self._unanswered.clear()
        self._progress.reach("the others go on")
        self._changed.notify_all()

    def give_up(self) -> None:
        """End the engines that failed; the connection was closed."""
        for link, error in self.errors.items():
            message = f"{type(error).__name__}: {error}"
            self.reports[link] = replace(self.reports[link], error=message, swap_finished_at=None)
            log.warning("%s did not take version %d: %s", link.engine_id, self._version, message)
            try:
                link.give_up(message)
            except Exception as unreachable:  # noqa: BLE001  (it ends by its own deadline)
                log.warning("%s cannot be reached to end it: %s", link.engine_id, unreachable)

    def _run(self) -> None:
        try:
            self._call_each(list(self.reports), self._pause, apart=True)
            ready = self._ready = [link for link in self.reports if link not in self.errors]
            if ready:
                group = self._groups.get(ready[0])
                if group is None or set(group.engines) != set(ready):
                    group = Group(ready, self._connect(ready, self._weights, self._transfer))
                with self._changed:
                    self.group = None if self._ended else group
                if self.group is None:  # nobody else would close it
                    group.sender.close()
                    raise UpdateRefused("this attempt was given up")
                begin = time.perf_counter()
                group.sender.send(self._weights, self._transfer)
                self._note(ready, load_seconds=time.perf_counter() - begin)
                self._call_each(ready, self._resume, apart=True)
        except Exception as error:  # noqa: BLE001  (recorded for the engines)
            self._fail(error)
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _pause(self, link: EngineLink) -> None:
        begin = time.perf_counter()
        try:
            seeding = link.pause(self._version, self._token) is None
            self._note([link], seeding=seeding, pause_seconds=time.perf_counter() - begin)
        except UpdateRefused as error:
            log.info("%s: %s", link.engine_id, error)
            if link not in self.errors:
                del self.reports[link]

    def _resume(self, link: EngineLink) -> None:
        begin = time.perf_counter()
        link.resume(self._token)
        seconds = time.perf_counter() - begin
        self._note([link], resume_seconds=seconds, swap_finished_at=clock.now())

    def _transfer(self, method: str, payloads: Sequence[dict[str, Any] | None]) -> None:
        """Call a method of every endpoint; the first error fails all engines at once."""
        payload_of = dict(zip(self._ready, payloads, strict=True))

        def transfer(link: EngineLink) -> None:
            try:
                link.transfer(self._token, method, payload_of[link])
            except Exception as error:
                self._fail(error, link)
                raise

        self._weights.reach(f"{method} was called")
        self._call_each(self._ready, transfer, apart=False)

    def _call_each(
        self, links: Sequence[EngineLink], call: Callable[[EngineLink], None], *, apart: bool
    ) -> None:
        """Call all engines at once and record their errors; UpdateRefused if the attempt ended."""

        def run(link: EngineLink) -> None:
            try:
                call(link)
            except Exception as error:  # noqa: BLE001  (recorded)
                self.errors.setdefault(link, error)
            with self._changed:
                self._unanswered.discard(link)
                self._weights.reach("an engine answered")
                self._changed.notify_all()

        with self._changed:
            if not self._ended:
                self._apart, self._unanswered = apart, set(links)
                for link in links:
                    threading.Thread(target=run, args=(link,), daemon=True).start()
            self._changed.wait_for(lambda: self._ended or not self._unanswered)
            if self._ended:
                raise UpdateRefused("this attempt was given up")

    def _fail(self, error: BaseException, culprit: EngineLink | None = None) -> None:
        """End the attempt: all its engines hold mixtures, or still wait for the rest."""
        with self._changed:
            for link in () if self._ended else self.reports:
                shared = error
                if culprit not in (None, link):
                    shared = LoadFailed(
                        f"{culprit.engine_id} failed while they took version {self._version} "
                        f"together: {type(error).__name__}: {error}"
                    )
                self.errors.setdefault(link, shared)
            self._ended = True
            self._changed.notify_all()

    def _note(self, links: Iterable[EngineLink], **changes: Any) -> None:
        for link in links:
            self.reports[link] = replace(self.reports[link], **changes)

"""The direct publisher writes weights into paused engines without staging (`staged = False`).

    for every group of engines in turn:   pause all ─▶ send ─▶ resume all at v ─▶ report each

With `together` the engines without a version form one group, so that one broadcast reaches them
all; else every engine is a group of its own. Engines of a group whose transfer failed or stalled
hold mixtures: they end, and nothing is sent to them again. Each group has its own deadline.
"""

import logging
import math
from collections.abc import Callable, Iterable, Sequence

import torch

from weight_sync.announcements import WeightUpdateReport
from weight_sync.direct.attempt import Attempt, Connect, EngineLink, Group
from weight_sync.publish.background_publisher import BackgroundPublisher, PendingVersion
from weight_sync.publish.snapshot import Snapshot

log = logging.getLogger(__name__)

GIVEN_UP = -1
SPARE_SHARE = 0.1
"""Share of a GPU that stays free beside two versions: later steps may need more than the first."""


def sends_from_device(nbytes: float, free: float, total: float) -> bool:
    """Return True if a GPU of `total` bytes, `free` of them beside steps, keeps two versions."""
    return free >= 2 * nbytes + SPARE_SHARE * total


class DirectPublisher(BackgroundPublisher):
    """Sends every version to every engine. Calls come from one thread at a time.

    Args:
        engines: Returns the present engines; called for every version.
        connect: Opens a connection to a group, under its deadline.
        report: Called with every attempt that paused an engine; one with an error ends the engine.
        timeout: Longest time in seconds without progress of a group, beside what the bytes take.
        wire_dtype: See `BackgroundPublisher`.
        seed_seconds: Interval at which engines that joined since get the newest version.
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
        self._patience = math.inf  # each group has a deadline of its own
        self._engines = engines
        self._connect = connect
        self._report = report
        self.together = False
        """Send to several engines at once; may be set before the first `publish`."""
        self._groups: dict[EngineLink, Group] = {}
        """The group that each connected engine belongs to."""
        self._sent: dict[EngineLink, int] = {}
        """The version that each engine has taken last, or GIVEN_UP."""
        self._newest: PendingVersion | None = None
        """The version that engines without it are sent; its memory is not used again meanwhile."""
        self._closed = False
        self.gpu_memory: Callable[[], tuple[int, int]] | None = None
        """Returns free and all bytes of the learner's GPU, called before the second version, when a
        step has shown what it needs; None copies versions to host memory."""
        self._copied: Snapshot | None = None
        """The copy of the version before."""
        self.on_device: bool | None = None
        """True if versions are copied on the GPU, as `sends_from_device`; None: not yet decided."""

    def _free_snapshot(self, version: int) -> Snapshot:
        snapshot = super()._free_snapshot(version)
        if self._copied is not None and self.on_device is None:
            nbytes = sum(tensor.nbytes for _, tensor in self._copied.tensors)
            memory = self.gpu_memory and self.gpu_memory()
            self.on_device = memory is not None and sends_from_device(nbytes, *memory)
            log.info("versions are sent from %s", "the GPU" if self.on_device else "the host")
        if self.on_device and not snapshot.on_device:
            snapshot = Snapshot(on_device=True)
        self._copied = snapshot
        return snapshot

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

    def _close(self) -> None:
        """Close all connections; an engine that is being sent to is the last."""
        self._closed = True
        self._disconnect(list(self._groups))
        self._newest = None

    def _seed(self, pending: PendingVersion) -> None:
        """Send a version to the engines that lack it."""
        engines = self._engines()
        for link in self._sent.keys() - set(engines):
            self._disconnect([link])
            del self._sent[link]
        lacking = [e for e in engines if self._sent.get(e) not in (pending.version, GIVEN_UP)]
        for members in [lacking] if self.together and lacking else [[link] for link in lacking]:
            if not self._closed:
                self._serve(members, pending)

    def _serve(self, members: Sequence[EngineLink], pending: PendingVersion) -> None:
        """Send a version to a group and report each engine, but those that refuse."""
        attempt = Attempt(members, pending, self._connect, self._groups, self._progress)
        attempt.wait()
        group = attempt.group
        if group is not None and self._groups.get(group.engines[0]) is not group:
            self._disconnect(group.engines)
            self._groups |= dict.fromkeys(group.engines, group)
        self._disconnect(attempt.errors)
        attempt.give_up()
        for link, report in attempt.reports.items():
            self._sent[link] = GIVEN_UP if link in attempt.errors else pending.version
            self._report(report)

    def _disconnect(self, links: Iterable[EngineLink]) -> None:
        """Close the connections of engines, which ends those of their groups."""
        for group in {self._groups[link] for link in links if link in self._groups}:
            for link in group.engines:
                self._groups.pop(link, None)
            group.sender.close()

"""Sends the weights of a policy version straight to the engines, while the learner goes on.

    publish(v, tensors)     caller's thread      copies to host memory, then returns (`publishing`)
        └─▶ background      every engine in turn: pause ─▶ send ─▶ resume at v        (`direct`)
    between versions        engines that do not serve the newest one get it: made again, or joined

The copy in host memory is what is sent, whatever the learner's weights are by then, and how a
restarted engine gets them. It stays until the next version is to be sent, so that two sets of host
memory suffice. Not for every engine together but for each one there is a deadline.
"""

import time

import torch

from weight_sync.direct.engines import DirectEngines
from weight_sync.publish.background_publisher import BackgroundPublisher, PendingVersion
from weight_sync.publish.snapshot import Snapshot

SEED_SECONDS = 1.0
"""How often it is looked for engines without the newest version."""


class DirectPublisher(BackgroundPublisher):
    """Sends every version to every engine. Calls come from one thread at a time.

    Args:
        engines: Who is served, and how; closed with the publisher.
        timeout: Seconds that one engine may take; twice as many without an end, and the next
            `publish` fails.
        wire_dtype: What every tensor is cast to before it travels; None: to nothing.
    """

    idle_seconds = SEED_SECONDS

    def __init__(
        self,
        engines: DirectEngines,
        *,
        timeout: float = 60.0,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(timeout=timeout, wire_dtype=wire_dtype)
        self._engines = engines
        self._newest: Snapshot | None = None

    def _send(self, handed: PendingVersion) -> None:
        before, self._newest = self._newest, None  # what fails now is not to be sent again
        if before is not None:
            self._give_back(before)
        self._engines.send(handed.version, handed.snapshot.tensors, handed.created_at)
        self._newest = handed.snapshot

    def _late(self, sending: PendingVersion) -> str | None:
        serving = self._engines.serving
        if serving is None or time.monotonic() - serving[1] <= 2 * self._timeout:
            return None
        return (
            f"{serving[0]} neither took version {sending.version} nor was given up within "
            f"{2 * self._timeout:g} s"
        )

    def _between(self) -> None:
        if self._newest is not None:
            self._engines.seed(self._newest.tensors)

    def _close(self) -> None:
        self._engines.close()
        self._newest = None

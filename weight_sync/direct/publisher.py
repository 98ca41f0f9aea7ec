"""The direct publisher sends each version from host memory straight to the engines.

Between versions it serves engines that joined or were replaced, from the same copy, which stays
until the next version is to be sent.
"""

import time

import torch

from weight_sync.direct.engines import DirectEngines
from weight_sync.publish.background_publisher import BackgroundPublisher, PendingVersion
from weight_sync.publish.snapshot import Snapshot


class DirectPublisher(BackgroundPublisher):
    """Sends every version to every engine. Calls come from one thread at a time.

    Args:
        engines: Closed with the publisher.
        timeout: Seconds that one engine may take; after twice as many the next `publish` fails.
        wire_dtype: See `BackgroundPublisher`.
        seed_seconds: Interval at which engines without the newest version are looked for.
    """

    def __init__(
        self,
        engines: DirectEngines,
        *,
        timeout: float = 60.0,
        wire_dtype: torch.dtype | None = None,
        seed_seconds: float = 1.0,
    ) -> None:
        super().__init__(timeout=timeout, wire_dtype=wire_dtype, idle_seconds=seed_seconds)
        self._engines = engines
        self._newest: Snapshot | None = None

    def _send(self, pending: PendingVersion) -> None:
        previous, self._newest = self._newest, None  # a failed version is not to be sent again
        if previous is not None:
            self._give_back(previous)
        self._engines.send(pending.version, pending.snapshot.tensors, pending.created_at)
        self._newest = pending.snapshot

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

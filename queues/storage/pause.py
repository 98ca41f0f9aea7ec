"""Pauses of a thread that writes to a disk, as other threads see them: it is full, or stalls."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

STALLED_PROBES = 5
"""A disk stalls if one write to it takes longer than this number of intervals between probes."""
LONGEST_SECONDS = 600.0
"""Longest time for which a stall counts as a pause; callers of the broker give up after it."""


class Pause:
    """Why a writer makes nothing durable for now.

    `disk` names what it writes to, as in "the disk of runs/mine". A full disk is probed every
    `probe_seconds`.
    """

    def __init__(self, disk: str, probe_seconds: float) -> None:
        self._disk, self._stall_seconds = disk, STALLED_PROBES * probe_seconds
        self.full: str | None = None
        """The words for a full disk; set by the writer while it waits for space."""
        self.until = -math.inf
        """Monotonic seconds of the end of the last pause; minus infinity before the first."""
        self._since: float | None = None
        """Monotonic seconds at which the present write began."""

    @property
    def reason(self) -> str | None:
        """The words for the pause; None while there is none."""
        since = self._since
        if since is None or self.full is not None:
            return self.full
        stalls = self._stall_seconds < time.monotonic() - since < LONGEST_SECONDS
        return f"{self._disk} does not answer" if stalls else None

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Watch a write, with all of its attempts while the disk is full."""
        self._since = time.monotonic()
        try:
            yield
        finally:
            if self.reason is not None:
                self.until = time.monotonic()
            self._since = self.full = None

"""Pauses of a thread that writes to a disk, as other threads see them: it is full, or stalls."""

import logging
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headway.full_disk import PROBE_BYTES, full_disk_message, has_space, is_full

log = logging.getLogger(__name__)

STALLED_PROBES = 5
"""A disk stalls if one write to it takes longer than this number of intervals between probes."""
LONGEST_SECONDS = 600.0
"""Longest time for which a stall counts as a pause; callers of the broker give up after it."""


class Pause:
    """Why a writer makes nothing durable for now.

    Args:
        disk: Names what it writes to, as in "the disk of runs/mine".
        folder: A folder on that disk.
        probe_seconds: Interval between probes of a full disk.
    """

    def __init__(self, disk: str, folder: Path, probe_seconds: float) -> None:
        self._disk, self._folder = disk, folder
        self._probe_seconds, self._stall_seconds = probe_seconds, STALLED_PROBES * probe_seconds
        self._full: str | None = None
        """The words for a full disk, while the writer waits for space."""
        self.until = -math.inf
        """Monotonic seconds of the end of the last pause; minus infinity before the first."""
        self._since: float | None = None
        """Monotonic seconds at which the present write began."""

    @property
    def reason(self) -> str | None:
        """The words for the pause; None while there is none."""
        since = self._since
        if since is None or self._full is not None:
            return self._full
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
            self._since = self._full = None

    def wait_for_space(
        self, error: Exception, closing: threading.Event, size: int = PROBE_BYTES
    ) -> bool:
        """Block until the disk has `size` bytes again; False after any error but of a full disk.

        Also False once `closing` is set.
        """
        if not is_full(error, self._folder):
            return False
        self._full = full_disk_message(self._folder)
        log.warning("paused: %s (%r)", self._full, error)
        while not closing.wait(self._probe_seconds):
            if has_space(self._folder, size):
                log.warning("there is space again on the disk of %s", self._folder)
                return True
        return False

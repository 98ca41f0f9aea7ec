"""Reaps the processes below this one whose parents have died, which process 1 may not do.

They are children of this process then. A zombie that is seen twice is one that nobody waits for:
those who start a process here wait for its end at once.
"""

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

PR_SET_CHILD_SUBREAPER = 36
INTERVAL_SECONDS = 10.0


@contextmanager
def reaping_orphans(interval: float = INTERVAL_SECONDS) -> Iterator[None]:
    """Adopt and reap orphans during the block, and all that have ended at its end."""
    _adopt(True)
    ended = threading.Event()
    thread = threading.Thread(target=_reap_until, args=(ended, interval), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        _adopt(False)
        _reap(_zombies())


def _adopt(orphans: bool) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(orphans), 0, 0, 0)


def _reap_until(ended: threading.Event, interval: float) -> None:
    seen: set[psutil.Process] = set()
    while not ended.wait(interval):
        zombies = _zombies()
        _reap(zombies & seen)
        seen = zombies


def _zombies() -> set[psutil.Process]:
    zombies = set()
    for process in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if process.status() == psutil.STATUS_ZOMBIE:
                zombies.add(process)
    return zombies


def _reap(zombies: set[psutil.Process]) -> None:
    for process in zombies:
        with suppress(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)

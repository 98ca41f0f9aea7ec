"""A writer pauses while its disk is full, and while one write takes too long, for a time."""

import errno
import threading

import pytest

from queues.storage import pause
from queues.storage.pause import LONGEST_SECONDS, STALLED_PROBES, Pause

PROBE_SECONDS = 2.0
STALL = STALLED_PROBES * PROBE_SECONDS


@pytest.fixture
def clock(monkeypatch):
    times = [100.0]
    monkeypatch.setattr(pause.time, "monotonic", lambda: times[0])
    return times


def test_a_write_that_takes_long_is_a_pause_until_it_ends_or_its_callers_give_up(clock, tmp_path):
    watched = Pause("the disk of here", tmp_path, PROBE_SECONDS)
    assert (watched.reason, watched.until) == (None, float("-inf"))
    with watched.writing():
        clock[0] += STALL
        assert watched.reason is None
        clock[0] += 1.0
        assert watched.reason == "the disk of here does not answer"
    assert (watched.reason, watched.until) == (None, 101.0 + STALL)
    with watched.writing():
        clock[0] += LONGEST_SECONDS
        assert watched.reason is None
    assert watched.until == 101.0 + STALL


def test_a_full_disk_is_a_pause_however_long(clock, tmp_path):
    watched, closing = Pause("the disk of here", tmp_path, PROBE_SECONDS), threading.Event()
    with watched.writing():
        closing.set()
        assert not watched.wait_for_space(OSError(errno.ENOSPC, "full"), closing)
        clock[0] += 2 * LONGEST_SECONDS
        assert watched.reason.startswith("no space is left on the disk of")
    assert (watched.reason, watched.until) == (None, clock[0])

"""A writer pauses while its disk is full, and while one write takes too long, for a time."""

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


def test_a_write_that_takes_long_is_a_pause_until_it_ends_or_its_callers_give_up(clock):
    one = Pause("the disk of here", PROBE_SECONDS)
    assert (one.reason, one.until) == (None, float("-inf"))
    with one.writing():
        clock[0] += STALL
        assert one.reason is None
        clock[0] += 1.0
        assert one.reason == "the disk of here does not answer"
    assert (one.reason, one.until) == (None, 101.0 + STALL)
    with one.writing():
        clock[0] += LONGEST_SECONDS
        assert one.reason is None
    assert one.until == 101.0 + STALL


def test_a_full_disk_is_a_pause_however_long(clock):
    one = Pause("the disk of here", PROBE_SECONDS)
    with one.writing():
        one.full = "no space is left"
        clock[0] += 2 * LONGEST_SECONDS
        assert one.reason == "no space is left"
    assert (one.reason, one.until) == (None, clock[0])

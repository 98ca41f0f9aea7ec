"""Time stamps in epoch seconds that no change of the machine's clock moves.

A command reads the wall clock once, and counts from there by the time since the machine started.
The processes that it starts on the same machine inherit the result, so the difference of two
stamps of one command on one machine is a true duration. Stamps of other machines, of processes of a
Ray cluster that the command joined, and of earlier sessions of a run are as far off as the wall
clocks were when those processes began: what compares them does not end a run.
"""

import os
import time
from pathlib import Path

VARIABLE = "HEADWAY_CLOCK"
"""Environment variable that child processes inherit: the machine's boot, and when that was."""


def now() -> float:
    """Return the time in epoch seconds."""
    return _BOOTED_AT + time.clock_gettime(time.CLOCK_BOOTTIME)


def wall(stamp: float) -> float:
    """Return what the wall clock would show now if it had shown `stamp` when `now` returned it.

    For those who compare a stamp with their own clock, as Prometheus does.
    """
    return time.time() - (now() - stamp)


def process_started() -> float:
    """Return when this process started, in the epoch seconds of `now`."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return _BOOTED_AT + ticks / os.sysconf("SC_CLK_TCK")


def _booted_at() -> float:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    known, _, booted_at = os.environ.get(VARIABLE, "").partition("=")
    if known != boot:  # the first process of a command, or one on another machine
        booted_at = repr(time.time() - time.clock_gettime(time.CLOCK_BOOTTIME))
        os.environ[VARIABLE] = f"{boot}={booted_at}"
    return float(booted_at)


_BOOTED_AT = _booted_at()

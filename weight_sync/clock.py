"""Time stamps as those of `queues.runtime.clock`, which this package does not import.

Processes that a command starts inherit its clock, by the environment variable.
"""

import os
import time
from pathlib import Path

VARIABLE = "HEADWAY_CLOCK"


def now() -> float:
    """Return the time in epoch seconds, unmoved by changes of the machine's clock."""
    return _BOOTED_AT + time.clock_gettime(time.CLOCK_BOOTTIME)


def _booted_at() -> float:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    known, _, booted_at = os.environ.get(VARIABLE, "").partition("=")
    if known != boot:
        booted_at = repr(time.time() - time.clock_gettime(time.CLOCK_BOOTTIME))
        os.environ[VARIABLE] = f"{boot}={booted_at}"
    return float(booted_at)


_BOOTED_AT = _booted_at()

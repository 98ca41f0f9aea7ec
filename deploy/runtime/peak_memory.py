"""Peak memory of a run's processes on this machine, as the system counts it.

Memory that processes share counts in each, and peaks of a role need not be at one time.
"""

import re
from collections import Counter
from pathlib import Path

import psutil

from headway.roles import Role

TITLES = {"ray::RankActor": Role.LEARNER, "ray::RolloutActor": Role.ACTOR, "VLLM::": Role.ACTOR}
"""Beginnings of the titles of processes: an engine counts with its actor."""


def peaks(parent: psutil.Process) -> Counter[Role]:
    """Return the peak resident bytes of learner and actors that run below a process, by role."""
    sums: Counter[Role] = Counter()
    for child in parent.children(recursive=True):
        try:
            command = child.cmdline()
            above = child.parent()
            if above is None or above.cmdline() == command:  # forked, to become another program
                continue
            status = Path(f"/proc/{child.pid}/status").read_text()
        except (psutil.Error, OSError):
            continue
        roles = [role for title, role in TITLES.items() if " ".join(command).startswith(title)]
        if roles and (high := re.search(r"VmHWM:\s*(\d+) kB", status)):
            sums[roles[0]] += 1024 * int(high[1])
    return sums

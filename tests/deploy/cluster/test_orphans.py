"""Orphans are adopted and reaped, and children that are waited for keep their exit codes."""

import subprocess
import sys

PROGRAM = """
import subprocess
import psutil
from deploy.cluster.orphans import reaping_orphans
from tests.waiting import until

def zombies():
    return [c for c in psutil.Process().children() if c.status() == psutil.STATUS_ZOMBIE]

def orphan(seconds):
    subprocess.run(["sh", "-c", f"sleep {seconds} & exit"], check=True)

with reaping_orphans(interval=0.05):
    own = subprocess.Popen(["sh", "-c", "exit 7"])
    assert own.wait() == 7
    orphan(0.1)
    until(lambda: psutil.Process().children())
    until(lambda: not psutil.Process().children())
with reaping_orphans(interval=3600):
    orphan(0)
    until(zombies)
assert zombies() == []
"""


def test_an_orphan_is_reaped_while_the_block_runs_and_at_its_end():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr

"""Freed memory stays with a process that keeps it."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
from learner.heap import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
torch.ones(50_000_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    torch.ones(50_000_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="an option of glibc")
def test_a_process_that_keeps_memory_does_not_ask_for_its_pages_again():
    def faults(how):
        command = [sys.executable, "-c", PROGRAM, how]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        return int(done.stdout)

    assert faults("give back") > 1000
    assert faults("keep") < 100

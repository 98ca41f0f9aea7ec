"""Freed memory stays with a process that keeps it."""

import subprocess
import sys

import pytest

MIB = 2**20
PROGRAM = """
import ctypes, sys
import psutil
from learner.heap import keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
before = psutil.Process().memory_info().rss
address = libc.malloc(200 * 2**20)
ctypes.memset(address, 1, 200 * 2**20)
libc.free(address)
print(psutil.Process().memory_info().rss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="an option of glibc")
def test_memory_freed_by_a_process_that_keeps_it_stays_resident():
    def resident(how):
        command = [sys.executable, "-c", PROGRAM, how]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        return int(done.stdout)

    assert resident("give back") < 20 * MIB
    assert resident("keep") > 180 * MIB

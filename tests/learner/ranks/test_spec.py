"""Freed memory stays with a process that keeps it, whichever thread it was freed by."""

import os
import subprocess
import sys

import pytest

from learner.ranks.spec import GLIBC_ON_CPU

MIB = 2**20
PROGRAM = """
import ctypes
from concurrent.futures import ThreadPoolExecutor
import psutil

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def use():
    before = psutil.Process().memory_info().rss
    address = libc.malloc(200 * 2**20)
    ctypes.memset(address, 1, 200 * 2**20)
    libc.free(address)
    return psutil.Process().memory_info().rss - before

print(ThreadPoolExecutor(1).submit(use).result())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="variables of glibc")
def test_memory_freed_by_a_process_that_keeps_it_stays_resident():
    def resident(variables):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        return int(done.stdout)

    assert resident({}) < 20 * MIB
    assert resident(GLIBC_ON_CPU) > 180 * MIB

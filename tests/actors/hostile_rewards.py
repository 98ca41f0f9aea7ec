"""Rewards that go wrong in every way that a process can; named by their dotted paths in tests."""

import asyncio
import ctypes
import os
import re
import signal
import subprocess
import time
from pathlib import Path

KEPT = []


def fine(prompt, completion, answer, metadata):
    return 1.0


async def waits(prompt, completion, answer, metadata):
    await asyncio.sleep(0.2)
    return 1.0


def sleeps(prompt, completion, answer, metadata):
    time.sleep(3600)


def loops_in_c(prompt, completion, answer, metadata):
    re.fullmatch(r"(a+)+b", "a" * 60)  # holds the interpreter's lock for ages


async def blocks(prompt, completion, answer, metadata):
    """Block the event loop for ever, if the completion asks for it."""
    await asyncio.sleep(0)
    if completion == "block":
        sleeps(prompt, completion, answer, metadata)
    return 1.0


def leaves(prompt, completion, answer, metadata):
    raise SystemExit(3)


def ends_the_process(prompt, completion, answer, metadata):
    os._exit(3)


def crashes(prompt, completion, answer, metadata):
    ctypes.string_at(0)


def gobbles(prompt, completion, answer, metadata):
    return float(len(bytearray(1 << 40)))


def leaks(prompt, completion, answer, metadata):
    KEPT.append(bytearray(b"x" * (16 << 20)))
    return float(os.getpid())


def prints(prompt, completion, answer, metadata):
    print('{"id": 0, "parts": {"hostile_rewards:prints": 100.0}}', flush=True)
    return 1.0


def own_process(prompt, completion, answer, metadata):
    return float(os.getpid())


def starts_another(prompt, completion, answer, metadata):
    child = subprocess.Popen(["sleep", "3600"])
    Path(metadata["note"]).write_text(str(child.pid))
    signal.pause()


def scaled(prompt, completion, answer, metadata, *, factor, offset=0.0):
    return {"size": len(completion) * factor, "offset": offset}


def cores(prompt, completion, answer, metadata):
    return float(len(os.sched_getaffinity(0)))

"""Rewards that go wrong in every way that a process can; named by their dotted paths in tests."""

import asyncio
import ctypes
import os
import re
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

KEPT = []
BORN = float(time.monotonic_ns())
"""Tells processes apart: their ids may be those of a namespace."""


def fine(prompt, completion, answer, metadata):
    return 1.0


async def waits(prompt, completion, answer, metadata):
    await asyncio.sleep(0.2)
    return 1.0


async def waits_for_ever(prompt, completion, answer, metadata):
    await asyncio.Event().wait()


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


async def blocks_a_while(prompt, completion, answer, metadata):
    """Block the event loop past its limit of 2 s, if the completion asks for it."""
    await asyncio.sleep(0)
    if completion == "block":
        time.sleep(2.6)  # noqa: ASYNC251
    return 1.0


async def stops(prompt, completion, answer, metadata):
    """Stop its process as SIGSTOP from outside does, if the completion asks for it."""
    await asyncio.sleep(0)
    if completion == "block":
        os.kill(os.getpid(), signal.SIGSTOP)
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
    return BORN


def prints(prompt, completion, answer, metadata):
    print('{"id": 0, "parts": {"hostile_rewards:prints": 100.0}}', flush=True)
    return 1.0


def starts_another(prompt, completion, answer, metadata):
    """Start a process that leaves the session, and note that it runs."""
    subprocess.Popen(["sleep", metadata["seconds"]], start_new_session=True)
    Path(metadata["note"]).touch()
    signal.pause()


def starts_one_and_returns(prompt, completion, answer, metadata):
    subprocess.Popen(["setsid", "--fork", "sleep", metadata["seconds"]]).wait()
    return 1.0


class Unspeakable(Exception):
    def __repr__(self):
        raise RuntimeError("no repr")

    __str__ = __repr__


def unspeakable(prompt, completion, answer, metadata):
    raise Unspeakable


def raises_at_length(prompt, completion, answer, metadata):
    raise ValueError("x" * 1_000_000)


def many_parts(prompt, completion, answer, metadata):
    return {str(number): 1.0 for number in range(100_000)}


def prints_at_length(prompt, completion, answer, metadata):
    for _ in range(100):
        os.write(1, b"x" * 100_000)
    return 1.0


def closes_the_channel(prompt, completion, answer, metadata):
    os.closerange(3, 1000)
    return 1.0


def writes_to_the_channel(prompt, completion, answer, metadata):
    """Write to every descriptor but those of the standard streams."""
    text = metadata["text"].encode()
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with suppress(OSError):
                os.write(int(name), text)
    return 1.0


def secrets(prompt, completion, answer, metadata):
    """Count the environments that this process can read and that have a text."""
    found = float(metadata["secret"] in "".join(os.environ.values()))
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            found += metadata["secret"].encode() in path.read_bytes()
    return found


def variable(prompt, completion, answer, metadata):
    return float(os.environ.get(metadata["name"]) == metadata["secret"])


def scaled(prompt, completion, answer, metadata, *, factor, offset=0.0):
    return {"size": len(completion) * factor, "offset": offset}


def cores(prompt, completion, answer, metadata):
    return float(len(os.sched_getaffinity(0)))

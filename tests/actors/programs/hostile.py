"""A program that tries what it must not: it writes HELD, or ESCAPED and what it got."""

import ctypes
import json
import os
import signal
import socket

libc = ctypes.CDLL(None, use_errno=True)


def call(number, *arguments):
    if libc.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def write(path):
    with open(path, "a") as file:
        file.write("hostile")


def read(path):
    with open(path) as file:
        return file.read()


def unix(path):
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)


def kill_all():
    """Kill whatever can be killed, and tell that nobody else was there."""
    for process in (1, -1, os.getppid()):
        os.kill(process, signal.SIGKILL)
    raise OSError("nobody else ended")


if __name__ == "__main__":
    with open(os.environ["HEADWAY_TASK"]) as file:
        world = json.load(file)["metadata"]
    try:
        result = "ESCAPED " + repr(eval(world["ATTACK"], globals() | world))
    except OSError as error:
        result = f"HELD {type(error).__name__}"
    with open(os.environ["HEADWAY_RESULT"], "w") as file:
        file.write(result)

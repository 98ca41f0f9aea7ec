"""The program of a reward process: reads calls from its input and writes their results.

    python -m actors.rewards.process_main MEMORY_BYTES PARENT_PID CORES

Messages are JSON objects, one a line, in both directions. `{"load": [name, options]}` loads a
reward, `{"call": [name, options], "arguments": [...]}` calls it, `{"cancel": id}` ends a coroutine;
each of the first two has an `id`, and one answer with it. It isolates failures, not attacks.

Where the kernel allows it, the rewards run in a PID namespace: they see no other process, and what
they have started ends with them.

    started process ─▶ init (pid 1: waits, and ends the rest) ─▶ the server
"""

import asyncio
import ctypes
import inspect
import json
import os
import resource
import signal
import sys
import threading
from contextlib import suppress
from typing import Any

from actors.rewards.find_reward import NoNumber, RewardFunction, find_reward, parts_of
from headway.errors import InputError
from headway.user_code import describe_error, where_raised

PR_SET_PDEATHSIG = 1
CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID = 0x00020000, 0x10000000, 0x20000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 2, 4, 8, 16384, 1 << 18
SIGNALLED = 128
"""Added to the number of the signal that ended the server, in the exit code of init."""


class Server:
    """Answers calls; coroutines run concurrently, plain functions one after the other."""

    def __init__(self, out: int) -> None:
        self._out = out
        self._rewards: dict[str, RewardFunction] = {}
        self._running: dict[int, asyncio.Task[None]] = {}

    def take(self, message: dict[str, Any]) -> None:
        """Start the work of one message."""
        if "cancel" in message:
            task = self._running.get(message["cancel"])
            if task is not None:
                task.cancel()
            return
        number = message["id"]
        task = self._running[number] = asyncio.ensure_future(self._serve(message))
        task.add_done_callback(lambda _: self._running.pop(number))

    async def _serve(self, message: dict[str, Any]) -> None:
        answer: dict[str, Any]
        try:
            if "load" in message:
                self._reward(*message["load"])
                answer = {}
            else:
                answer = {"parts": await self._call(message["call"], message["arguments"])}
        except asyncio.CancelledError:
            answer = {"error": "was cancelled"}
        except NoNumber as error:
            answer = {"error": str(error)}
        except InputError as error:
            answer = {"error": f"cannot be used: {error}"}
        except MemoryError as error:
            answer = {"error": describe_error(error), "memory": True}
        except BaseException as error:  # noqa: BLE001  (SystemExit too: the caller gets it)
            answer = {"error": describe_error(error), "where": where_raised(error)}
        line = json.dumps({"id": message["id"], "resident": resident_bytes(), **answer}) + "\n"
        try:
            _write(self._out, line.encode())
        except OSError:  # the reward has closed it: the call fails, and the process is replaced
            os._exit(1)

    async def _call(self, reward: list[Any], arguments: list[Any]) -> dict[str, float]:
        value = self._reward(*reward)(*arguments)
        return parts_of(reward[0], await value if inspect.isawaitable(value) else value)

    def _reward(self, name: str, options: dict[str, Any]) -> RewardFunction:
        key = json.dumps([name, options])
        if key not in self._rewards:
            self._rewards[key] = find_reward(name, options)
        return self._rewards[key]


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _write(out: int, line: bytes) -> None:
    while line:
        line = line[os.write(out, line) :]


async def _serve_until_end(out: int) -> None:
    loop, server, ended = asyncio.get_running_loop(), Server(out), asyncio.Event()

    def read() -> None:
        for line in sys.stdin.buffer:
            loop.call_soon_threadsafe(server.take, json.loads(line))
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    await ended.wait()


def enter_namespace() -> None:
    """Go on in a PID namespace with a /proc of its own, or as before where that is not allowed."""
    libc = ctypes.CDLL(None)
    trial = os.fork()
    if trial == 0:
        with suppress(OSError):
            _unshare(libc)
            os._exit(0)
        os._exit(1)
    if os.waitpid(trial, 0)[1]:
        return
    _unshare(libc)
    if (code := _wait_in_parent()) is not None:
        if code > SIGNALLED:
            signal.signal(code - SIGNALLED, signal.SIG_DFL)
            os.kill(os.getpid(), code - SIGNALLED)
        os._exit(code)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.mount(b"none", b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None)
    flags = ctypes.c_ulong(MS_NOSUID | MS_NODEV | MS_NOEXEC)
    libc.mount(b"proc", b"/proc", b"proc", flags, None)
    if (code := _wait_in_parent()) is not None:
        os._exit(code)


def _unshare(libc: ctypes.CDLL) -> None:
    """Let children be in a new PID namespace; raise OSError if this is not allowed."""
    user, group, root = os.getuid(), os.getgid(), os.geteuid() == 0
    if libc.unshare(CLONE_NEWNS | CLONE_NEWPID | (0 if root else CLONE_NEWUSER)) < 0:
        raise OSError("no namespaces")
    if not root:
        maps = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
        for name, text in maps.items():
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)


def _wait_in_parent() -> int | None:
    """Fork; return None in the child, and in the parent its exit code once it has ended."""
    child = os.fork()
    if child == 0:
        return None
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # their other ends have to see when the child closes them
        os.dup2(null, descriptor)
    while True:
        ended, status = os.wait()
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else SIGNALLED - code


def main() -> None:
    """Serve until the input ends."""
    memory, parent = int(sys.argv[1]), int(sys.argv[2])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before
        return
    enter_namespace()
    with suppress(OSError):  # cores that a cpuset has taken away since
        os.sched_setaffinity(0, map(int, sys.argv[3].split(",")))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    out = os.dup(1)
    os.dup2(2, 1)
    asyncio.run(_serve_until_end(out))


if __name__ == "__main__":
    main()

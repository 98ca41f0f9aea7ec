"""The server in a reward or verifier process: its start, its messages, the rewards that it loads.

    python -m actors.rewards.PROGRAM MEMORY_BYTES PARENT_PID CORES [ARGUMENT]

Messages are JSON objects, one a line, in both directions. `{"load": [name, options]}` loads a
reward, `{"call": [name, options], "arguments": [...]}` calls it, `{"cancel": id}` ends a call that
waits; each of the first two has an `id`, and one answer with it. What is printed goes to the
standard error.
"""

import asyncio
import json
import os
import resource
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO

from actors.outages import outage
from actors.rewards.find_reward import NoNumber, RewardFunction, find_reward
from actors.sandbox.linux import end_with_parent
from headway.errors import InputError
from headway.user_code import describe_error, where_raised

LONGEST_MESSAGE = 1 << 30
"""Most bytes of a message to the server."""


class Server(ABC):
    """Answers messages concurrently, as far as calls wait.

    `memory_bytes` limits the private memory of this process or of what it forks; answers are
    written to the descriptor `out`.
    """

    def __init__(self, memory_bytes: int, out: int) -> None:
        self.memory_bytes, self._out = memory_bytes, out
        self.rewards: dict[str, RewardFunction] = {}
        """By `json.dumps([name, options])`."""
        self._running: dict[int, asyncio.Task[None]] = {}

    @abstractmethod
    async def call(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a call; an error of the reward may be raised."""

    def load(self, name: str, options: dict[str, Any]) -> RewardFunction:
        """Return the function of a reward, bound to its options."""
        key = json.dumps([name, options])
        if key not in self.rewards:
            self.rewards[key] = find_reward(name, options)
        return self.rewards[key]

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
        answer: dict[str, Any] = {}
        try:
            if "load" in message:
                self.load(*message["load"])
            else:
                answer = await self.call(message)
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
            if away := outage(error):
                answer["away"] = away.retry_after
        try:
            write_line(self._out, {"id": message["id"], "resident": resident_bytes(), **answer})
        except OSError:  # the reward has closed it: the call fails, and the process is replaced
            os._exit(1)


def serve(
    make_server: Callable[[int, int], Server],
    *,
    isolate: Callable[[], None] | None = None,
) -> None:
    """Run a server until its input ends.

    `make_server` takes the limit of memory in bytes and the descriptor of answers. `isolate` is
    called first, and may go on in a child.
    """
    memory, parent, cores = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    end_with_parent()
    if os.getppid() != parent:  # it ended before
        return
    if isolate is not None:
        isolate()
    with suppress(OSError):  # cores that a cpuset has taken away since
        os.sched_setaffinity(0, map(int, cores.split(",")))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    out = os.dup(1)
    with open(os.dup(0), "rb") as messages, open(os.devnull, "rb") as null:
        os.dup2(null.fileno(), 0)
        os.dup2(2, 1)
        asyncio.run(_take_all(make_server(memory, out), messages))


async def _take_all(server: Server, messages: BinaryIO) -> None:
    reader = asyncio.StreamReader(limit=LONGEST_MESSAGE)
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, messages)
    async for line in reader:
        server.take(json.loads(line))
    os._exit(0)


def write_line(descriptor: int, value: dict[str, Any]) -> None:
    """Write a JSON object and the end of its line."""
    line = json.dumps(value).encode() + b"\n"
    while line:
        line = line[os.write(descriptor, line) :]


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

"""The server in a reward or verifier process: its start, its messages, the rewards that it loads.

    python -m actors.rewards.PROGRAM MEMORY_BYTES PARENT_PID CORES [ARGUMENT]

Messages are JSON objects, one a line, in both directions. `{"load": [name, options]}` loads a
reward, `{"call": [name, options], "arguments": [...], "seconds": limit}` calls it; both have an
`id`, and one answer with it. What is printed goes to the standard error.
"""

import asyncio
import json
import os
import resource
import signal
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, BinaryIO, NoReturn

from actors.outages import outage
from actors.rewards.find_reward import NoNumber, RewardFunction, find_reward
from actors.sandbox.linux import end_with_parent
from headway.errors import InputError
from headway.user_code import describe_error, where_raised

LONGEST_MESSAGE = 1 << 30
"""Most bytes of a message to the server."""


class Server(ABC):
    """Answers messages concurrently, as far as calls wait; no loop runs while others are answered.

    `memory_bytes` limits the private memory of this process or of what it forks; answers are
    written to the descriptor `out`.
    """

    def __init__(self, memory_bytes: int, out: int) -> None:
        self.memory_bytes, self._out, self._pid = memory_bytes, out, os.getpid()
        self.rewards: dict[str, RewardFunction] = {}
        """By `json.dumps([name, options])`."""
        self._loop = asyncio.new_event_loop()
        self._running: set[asyncio.Task[None]] = set()

    @abstractmethod
    async def call(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a call that waits; an error of the reward may be raised."""

    def plain(self, message: dict[str, Any]) -> Callable[[], dict[str, Any]] | None:
        """Return a function that answers a call without a running loop; None if `call` does."""
        return None

    def load(self, name: str, options: dict[str, Any]) -> RewardFunction:
        """Return the function of a reward, bound to its options."""
        key = json.dumps([name, options])
        if key not in self.rewards:
            self.rewards[key] = find_reward(name, options)
        return self.rewards[key]

    def run(self, messages: BinaryIO) -> NoReturn:
        """Answer messages until their end, then end the process."""
        reader = asyncio.StreamReader(limit=LONGEST_MESSAGE, loop=self._loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=self._loop)
        self._loop.run_until_complete(self._loop.connect_read_pipe(lambda: protocol, messages))
        while blocking := self._loop.run_until_complete(self._next_blocking(reader)):
            number, work = blocking
            try:
                answer = work()
            except BaseException as error:  # noqa: BLE001  (SystemExit too: the caller gets it)
                answer = self._failure(error)
            self._answer(number, answer)
        os._exit(0)

    async def _next_blocking(
        self, reader: asyncio.StreamReader
    ) -> tuple[int, Callable[[], dict[str, Any]]] | None:
        """Start calls that wait until a message comes whose work does not; None at their end."""
        async for line in reader:
            message = json.loads(line)
            if "load" in message:
                return message["id"], partial(self._load, message["load"])
            if (work := self.plain(message)) is not None:
                return message["id"], work
            self._start(message["id"], message)
        return None

    def _load(self, reward: tuple[str, dict[str, Any]]) -> dict[str, Any]:
        self.load(*reward)
        return {}

    def _start(self, number: int, message: dict[str, Any]) -> None:
        task = self._loop.create_task(self._wait(number, message))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _wait(self, number: int, message: dict[str, Any]) -> None:
        try:
            answer = await self.call(message)
        except BaseException as error:  # noqa: BLE001
            answer = self._failure(error)
        self._answer(number, answer)

    def _failure(self, error: BaseException) -> dict[str, Any]:
        """Return the answer to a call that raised; a child that the reward forked ends with it."""
        if os.getpid() != self._pid:
            end_child(error)
        if isinstance(error, NoNumber):
            return {"error": str(error)}
        if isinstance(error, InputError):
            return {"error": f"cannot be used: {error}"}
        if isinstance(error, MemoryError):
            return {"error": describe_error(error), "memory": True}
        answer: dict[str, Any] = {"error": describe_error(error), "where": where_raised(error)}
        if away := outage(error):
            answer["away"] = away.retry_after
        return answer

    def _answer(self, number: int, answer: dict[str, Any]) -> None:
        if os.getpid() != self._pid:  # a child that the reward forked has returned: it ends
            os._exit(0)
        try:
            write_line(self._out, {"id": number, "resident": resident_bytes(), **answer})
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
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        make_server(memory, out).run(messages)


def end_child(error: BaseException) -> NoReturn:
    """End a forked child at once by an error; its loop shares descriptors with its parent's."""
    code = error.code if isinstance(error, SystemExit) else 1
    if not isinstance(error, SystemExit):
        traceback.print_exception(error)
    os._exit(code if isinstance(code, int) else bool(code))


def write_line(descriptor: int, value: dict[str, Any]) -> None:
    """Write a JSON object and the end of its line."""
    line = json.dumps(value).encode() + b"\n"
    while line:
        line = line[os.write(descriptor, line) :]


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

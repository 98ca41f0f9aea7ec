"""The program of a reward process, which calls rewards; `server` has its messages.

Coroutines run concurrently in one event loop, plain functions one after the other in the main
thread without one, as in a script of the user's. It isolates failures, not attacks.
Where the kernel allows it, the rewards run in a PID namespace: they see no other process, and what
they have started ends with them.

    started process ─▶ init (pid 1: waits, and ends the rest) ─▶ the server
"""

import asyncio
import inspect
import os
import resource
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from traceback import walk_stack
from types import FrameType
from typing import Any

from actors.outages import in_network, outage
from actors.rewards.find_reward import score_of
from actors.rewards.server import Server, serve
from actors.sandbox import linux
from headway.user_code import is_coroutine, where_raised

SIGNALLED = 128
"""Added to the number of the signal that ended the server, in the exit code of init."""
PARTS_OF_LIMIT = 10
NAMESPACES = linux.CLONE_NEWNS | linux.CLONE_NEWPID


class RewardServer(Server):
    """Calls rewards in this process, which has a limit of memory."""

    def __init__(self, memory_bytes: int, out: int) -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
        super().__init__(memory_bytes, out)
        self._own_loop = asyncio.new_event_loop()

    async def call(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the parts of the score of a coroutine function within its limit.

        `again` is true where others that block this process may have cost it its time.
        """
        (name, options), seconds = message["call"], message["seconds"]
        late = {"error": f"took longer than {seconds:g} s"}
        reward, began = self.load(name, options), time.monotonic()
        arguments = message["arguments"]
        end = asyncio.create_task(cancel_after(seconds, asyncio.current_task()))
        try:
            parts = score_of(name, arguments[1], await reward(*arguments))
        except asyncio.CancelledError as error:
            if end.done():
                return late | ({"away": 0.0, "where": where_raised(error)} if outage(error) else {})
            raise
        finally:
            end.cancel()
        return {**late, "again": True} if time.monotonic() - began > seconds else {"parts": parts}

    def plain(self, message: dict[str, Any]) -> Callable[[], dict[str, Any]] | None:
        """Return what calls a plain function; None for a coroutine function."""
        name, options = message["call"]
        reward, arguments = self.load(name, options), message["arguments"]
        if is_coroutine(reward):
            return None
        function, seconds = partial(reward, *arguments), message["seconds"]
        return lambda: {"parts": score_of(name, arguments[1], self._returned(function, seconds))}

    def _returned(self, function: Callable[[], Any], seconds: float) -> Any:
        """Call a plain function, and undo what it does to its process that the next would notice.

        `asyncio.get_event_loop` gives it a loop of its own, in which an awaitable that it returns
        is awaited. After so many seconds, a function that waits for the network is cancelled, since
        its service is away; any other one waits for the end of its process.
        """

        def end_wait(_: int, frame: FrameType | None) -> None:
            if in_network(walk_stack(frame)):
                raise asyncio.CancelledError(f"took longer than {seconds:g} s")
            while True:
                signal.pause()

        signal.signal(signal.SIGALRM, end_wait)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        if self._own_loop.is_closed():
            self._own_loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._own_loop)
        folder = os.open(".", os.O_PATH)
        try:
            score = function()
            if inspect.isawaitable(score):
                return self._own_loop.run_until_complete(score)
            return score
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            os.fchdir(folder)
            os.close(folder)


async def cancel_after(seconds: float, task: asyncio.Task[Any] | None) -> None:
    """Cancel a task after some time, of which a block of the event loop takes one part at most."""
    for _ in range(PARTS_OF_LIMIT):
        await asyncio.sleep(seconds / PARTS_OF_LIMIT)
    if task is not None:
        task.cancel()


def enter_namespace() -> None:
    """Go on in a PID namespace with a /proc of its own, or as before where that is not allowed."""
    trial = os.fork()
    if trial == 0:
        with suppress(OSError):
            linux.unshare(NAMESPACES)
            os._exit(0)
        os._exit(1)
    if os.waitpid(trial, 0)[1]:
        return
    linux.unshare(NAMESPACES)
    init = os.fork()
    if init:
        code = linux.wait_as_init(init)
        if code - SIGNALLED in signal.valid_signals():
            with suppress(OSError):  # nothing handles SIGKILL
                signal.signal(code - SIGNALLED, signal.SIG_DFL)
            os.kill(os.getpid(), code - SIGNALLED)
        os._exit(code)
    linux.end_with_parent()
    with suppress(OSError):
        linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
        flags = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
        linux.mount("proc", "/proc", "proc", flags)
    server = os.fork()
    if server:
        code = linux.wait_as_init(server)
        os._exit(code if code >= 0 else SIGNALLED - code)


if __name__ == "__main__":
    serve(RewardServer, isolate=enter_namespace)

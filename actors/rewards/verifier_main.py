"""The program that runs verifiers: it forks sandboxed processes that read the completions.

    call ─▶ this process: has loaded the libraries, reads no completion ─▶ an idle child, or a new
    one (`verifier_child`): reads the prompt's answer, then the completion ─▶ the score

`server` has its messages; a call has `seconds` too, its deadline. Once the child has read the
prompt's answer, errors, crashes and its limits of processor time and memory are the completion's
doing: the score is 0, and `note` has the reason. What goes wrong before, a kill from outside, and
the deadline are failures. A child that is spent ends with its call.
"""

import asyncio
import gc
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from actors.rewards.find_reward import parts_of
from actors.rewards.libraries import preload
from actors.rewards.server import Server, serve, write_line
from actors.rewards.verifier_child import READY, run_child
from actors.sandbox.system_calls import compute_filter

LONGEST = 1 << 16
"""Most bytes that a child may answer."""
MOST_CALLS = 1000
"""Calls after which a child ends: the caches of libraries grow."""
MOST_IDLE = 16
"""Children that wait for a call."""
MOST_IMPORTS = 16
"""Most times that a call is repeated because a library wants to import a part of itself."""
NOT_IMPORTED = ("antigravity", "idlelib", "test", "this", "tkinter", "turtle", "turtledemo")
KILLED = "lost the child that read it, killed from outside (SIGKILL)"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answer of a child to one call, or its end without one."""

    ready: bool
    """It had read the prompt's answer."""
    result: Mapping[str, Any]
    ended: str = ""
    """Its end without a result, in words; "" where there is none."""


class Child(asyncio.Protocol):
    """A process that reads completions, one at a time; `calls` is the descriptor of the pipe to it.

    `generation` is what its parent had loaded before it was forked.
    """

    def __init__(self, pid: int, calls: int, generation: tuple[int, ...]) -> None:
        self._pid, self._calls, self.generation = pid, calls, generation
        self.served = 0
        self._answer = bytearray()
        self._outcome: asyncio.Future[Outcome] | None = None
        self._killed = ""

    def cpu(self) -> float:
        """Return its processor time in seconds (the clock of `clock_getcpuclockid`)."""
        try:
            return time.clock_gettime((~self._pid << 3) | 2)
        except OSError:  # it has ended
            return 0.0

    async def ask(self, message: dict[str, Any], cpu_limit: float) -> Outcome:
        """Let it read one completion; kill it past `cpu_limit` or `message["seconds"]`."""
        self.served += 1
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._outcome = outcome
        cpu_before, now = self.cpu(), time.monotonic()
        limit, deadline = min(cpu_limit, message["seconds"] / 2), now + message["seconds"]
        check_at = now + limit
        with suppress(BrokenPipeError):  # it has ended: the outcome says so
            write_line(self._calls, {name: message[name] for name in ("call", "arguments")})
        while not (await asyncio.wait([outcome], timeout=min(check_at, deadline) - now))[0]:
            used, now = self.cpu() - cpu_before, time.monotonic()
            # A busy machine, if the child had hardly any of its time; else the completion.
            if used >= limit or (now >= deadline and used >= limit / 4):
                self.kill(f"took more than its processor time, {cpu_limit:g} s")
            elif now >= deadline:
                self.kill("late")
            if self._killed:
                return await outcome
            check_at = now + max(0.01, limit - used)
        return outcome.result()

    def kill(self, reason: str) -> None:
        """Kill it; `reason` is how it ended."""
        if not self._killed:
            self._killed = reason
            os.kill(self._pid, signal.SIGKILL)

    def leave(self) -> None:
        """Let it end, since no further call comes."""
        if self._calls >= 0:
            os.close(self._calls)
            self._calls = -1

    def data_received(self, data: bytes) -> None:
        """Take a part of its answer."""
        self._answer += data
        if self._outcome is None or len(self._answer) > LONGEST:
            self.kill("gave too long an answer")
        ready, result = _parsed(self._answer)
        if result is not None and not self._killed and not result.get("spent", True):
            self._settle(Outcome(ready, result))

    def connection_lost(self, exc: Exception | None) -> None:
        """Take note of its end."""
        self.leave()
        code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        ready, result = _parsed(self._answer)
        self._settle(Outcome(ready, result or {}, self._killed or _ended(code)))

    def _settle(self, outcome: Outcome) -> None:
        self._answer.clear()
        if self._outcome is not None:
            self._outcome.set_result(outcome)
            self._outcome = None

    @property
    def alive(self) -> bool:
        """True if it may serve another call."""
        return self._calls >= 0 and not self._killed


class VerifierServer(Server):
    """Answers calls, each in a child; children run concurrently."""

    def __init__(self, memory_bytes: int, out: int) -> None:
        super().__init__(memory_bytes, out)
        self._cpu_seconds = float(sys.argv[4])
        self._loaded: set[str] = set()
        self._filter = compute_filter()
        self._idle: list[Child] = []

    @property
    def _generation(self) -> tuple[int, ...]:
        """The numbers of rewards, libraries and modules that are loaded, which a child inherits."""
        return len(self.rewards), len(self._loaded), len(sys.modules)

    async def call(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the parts of a score, and a `note` where the completion broke the verifier."""
        for _ in range(MOST_IMPORTS + 1):
            self._prepare(message)
            outcome = await self._outcome(message)
            if outcome.ended == "late":
                return {"error": f"took longer than {message['seconds']:g} s"}
            if "import" not in outcome.result or not self._import(outcome.result["import"]):
                break
        return self._concluded(message["call"][0], outcome)

    def _prepare(self, message: dict[str, Any]) -> None:
        """Load a verifier, and the library that the prompt needs."""
        (name, options), metadata = message["call"], message["arguments"][3]
        self.load(name, options)
        loaded = preload(name, metadata)
        if loaded not in self._loaded:
            self._loaded.add(loaded)
            gc.collect()
            gc.freeze()  # children share its memory, which no collection touches from now on

    async def _outcome(self, message: dict[str, Any]) -> Outcome:
        child = None
        while self._idle and child is None:
            child = self._idle.pop()
            if child.generation != self._generation:
                child.leave()
            if not child.alive:
                child = None
        if child is None:
            child = await self._fork()
        outcome = await child.ask(message, self._cpu_seconds)
        if child.served < MOST_CALLS and len(self._idle) < MOST_IDLE:
            self._idle.append(child)
        else:
            child.leave()
        return outcome

    async def _fork(self) -> Child:
        (calls, to_child), (from_child, answers) = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            run_child(calls, answers, self.rewards, self.memory_bytes, self._filter)
        os.close(calls)
        os.close(answers)
        child = Child(pid, to_child, self._generation)
        answering = open(from_child, "rb")  # noqa: SIM115, ASYNC230  (the event loop closes it)
        await asyncio.get_running_loop().connect_read_pipe(lambda: child, answering)
        return child

    def _concluded(self, name: str, outcome: Outcome) -> dict[str, Any]:
        with suppress(ValueError, TypeError, KeyError):
            if outcome.ready:
                return {"parts": parts_of(name, outcome.result["score"])}
        problem = str(outcome.result.get("error") or outcome.ended or "gave no score")
        if outcome.ready and outcome.ended != KILLED and not outcome.result.get("failed"):
            return {"parts": {name: 0.0}, "note": problem}
        return {"error": problem, "killed": outcome.ended == KILLED}

    def _import(self, names: Any) -> bool:
        """Import what a library lacked, as far as it is loaded here; True if anything was."""
        before = len(sys.modules)
        for name in names if isinstance(names, list) else ():
            root = str(name).partition(".")[0]
            known = root in sys.modules or root in sys.stdlib_module_names
            if known and root not in NOT_IMPORTED and not str(name).endswith("__main__"):
                with suppress(Exception):
                    importlib.import_module(name)
        return len(sys.modules) > before


def _parsed(answer: bytes | bytearray) -> tuple[bool, dict[str, Any] | None]:
    """Return True if the prompt's answer was read, and the result, None if it is not complete."""
    ready = answer.startswith(READY)
    line, complete, _ = bytes(answer).removeprefix(READY).partition(b"\n")
    if not complete:
        return ready, None
    with suppress(ValueError, RecursionError):
        value = json.loads(line)
        if isinstance(value, dict):
            return ready, value
    return ready, {}


def _ended(code: int) -> str:
    if code == -signal.SIGKILL:
        return KILLED
    return f"ended its process ({signal.Signals(-code).name})" if code < 0 else ""


if __name__ == "__main__":
    serve(VerifierServer)

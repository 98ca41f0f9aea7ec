"""The program that runs verifiers: it forks sandboxed processes that read the completions.

    python -m actors.rewards.verifier_main MEMORY_BYTES PARENT_PID CORES CPU_SECONDS

    call ─▶ this process: has loaded the libraries, reads no completion ─▶ an idle child, or a new
    one (`verifier_child`): reads the prompt's answer, then the completion ─▶ the score

Messages are those of `process_main`; a call has `seconds` too, its deadline. Once the child has
read the prompt's answer, errors, crashes and its limits of processor time and memory are the
completion's doing: the score is 0, and `note` has the reason. What goes wrong before, a kill from
outside, and the deadline are failures. A child that is spent ends with its call.
"""

import ctypes
import gc
import importlib
import json
import os
import resource
import selectors
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from actors.rewards.find_reward import RewardFunction, find_reward, parts_of
from actors.rewards.libraries import preload
from actors.rewards.process_main import PR_SET_PDEATHSIG, resident_bytes
from actors.rewards.verifier_child import READY, run_child
from actors.sandbox.system_calls import compute_filter
from headway.errors import InputError
from headway.user_code import describe_error

LONGEST = 1 << 16
"""Most bytes that a child may answer."""
MOST_CALLS = 1000
"""Calls after which a child ends: the caches of libraries grow."""
MOST_IDLE = 16
"""Children that wait for a call."""
MOST_IMPORTS = 16
"""Most times that a call is repeated because a library wants to import a part of itself."""
NOT_IMPORTED = ("antigravity", "idlelib", "test", "this", "tkinter", "turtle", "turtledemo")


@dataclass(slots=True, eq=False)
class Child:
    """A process that reads completions, one at a time."""

    pid: int
    calls: int
    """Descriptor of the pipe to it."""
    answers: int
    """Descriptor of the pipe from it."""
    generation: int
    """Of what was loaded when it was forked."""
    call: dict[str, Any] | None = None
    """The message that it works on."""
    served: int = 0
    answer: bytearray = field(default_factory=bytearray)
    deadline: float = 0.0
    """Monotonic seconds, while it works."""
    cpu_limit: float = 0.0
    """Seconds of processor time for the call."""
    check_at: float = 0.0
    """Monotonic seconds: it cannot have used up its processor time before."""
    cpu_before: float = 0.0
    """Processor time in seconds when the call began."""
    killed: str = ""
    """Reason why this process killed it, and "" if it did not."""

    def cpu(self) -> float:
        """Return its processor time in seconds (the clock of `clock_getcpuclockid`)."""
        try:
            return time.clock_gettime((~self.pid << 3) | 2)
        except OSError:  # it has ended: `Server.read` sees that
            return 0.0


class Server:
    """Answers calls, each in a child; children run concurrently."""

    def __init__(self, out: int, memory: int, cpu_seconds: float) -> None:
        self._out, self._memory, self._cpu_seconds = out, memory, cpu_seconds
        self._rewards: dict[str, RewardFunction] = {}
        self._loaded: set[str] = set()
        self._generation = 0
        self._filter = compute_filter()
        self.selector = selectors.DefaultSelector()
        self._idle: list[Child] = []
        self._working: set[Child] = set()

    def take(self, message: dict[str, Any]) -> None:
        """Start the work of one message."""
        name, options = message.get("load") or message["call"]
        try:
            key = json.dumps([name, options])
            if key not in self._rewards:
                self._rewards[key] = find_reward(name, options)
                self._generation += 1
            if "load" in message:
                self._answer(message, {})
                return
            loaded = preload(name, message["arguments"][3])
            if loaded not in self._loaded:
                self._loaded.add(loaded)
                self._generation += 1
                gc.collect()
                gc.freeze()  # children share its memory
            self._start(message)
        except InputError as error:
            self._answer(message, {"error": f"cannot be used: {error}"})
        except Exception as error:  # noqa: BLE001  (the caller gets it)
            self._answer(message, {"error": describe_error(error)})

    def seconds(self) -> float | None:
        """Return the seconds until a child may be late; None where none works."""
        nearest = [min(child.check_at, child.deadline) for child in self._working]
        return max(0.0, min(nearest) - time.monotonic()) if nearest else None

    def kill_late(self) -> None:
        """Kill the children that are past their deadline or their processor time."""
        now = time.monotonic()
        for child in self._working:
            if now < min(child.check_at, child.deadline) or child.killed:
                continue
            used = child.cpu() - child.cpu_before
            if used >= child.cpu_limit:
                self._kill(child, "cpu")
            elif now >= child.deadline:
                # A busy machine, if the child had hardly any of its time; else the completion.
                self._kill(child, "cpu" if used >= child.cpu_limit / 4 else "late")
            else:
                child.check_at = now + max(0.01, child.cpu_limit - used)

    def read(self, child: Child) -> None:
        """Read what a child answers; answer the call at its line, or at the end of the child."""
        block = os.read(child.answers, LONGEST)
        child.answer += block
        if len(child.answer) > LONGEST and not child.killed:
            self._kill(child, "long")
        ready, result = _parsed(child.answer)
        if result is not None and not child.killed and not result.get("spent", True):
            self._working.discard(child)
            message, child.call, child.answer = child.call, None, bytearray()
            assert message is not None
            self._settle(child)
            self._conclude(message, ready, result, "")
        elif not block:
            self._working.discard(child)
            message = child.call
            code = self._reap(child)
            if message is not None:
                self._conclude(message, ready, result or {}, child.killed or _ended(code))

    def _start(self, message: dict[str, Any]) -> None:
        child = None
        while self._idle and child is None:
            candidate = self._idle.pop()
            if candidate.generation == self._generation:
                child = candidate
            else:
                self._reap(candidate)
        child = child or self._fork()
        now = time.monotonic()
        child.call, child.cpu_before = message, child.cpu()
        child.cpu_limit = min(self._cpu_seconds, message["seconds"] / 2)
        child.deadline, child.check_at = now + message["seconds"], now + child.cpu_limit
        child.served += 1
        self._working.add(child)
        request = {"call": message["call"], "arguments": message["arguments"]}
        line = json.dumps(request).encode() + b"\n"
        with suppress(BrokenPipeError):  # it has died: `read` sees the end
            while line:
                line = line[os.write(child.calls, line) :]

    def _settle(self, child: Child) -> None:
        """Keep a child for the next call, or end it."""
        fresh = child.generation == self._generation and child.served < MOST_CALLS
        if fresh and len(self._idle) < MOST_IDLE:
            self._idle.append(child)
        else:
            self._reap(child)

    def _fork(self) -> Child:
        (calls, to_child), (from_child, answers) = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            run_child(calls, answers, self._rewards, self._memory, self._filter)
        os.close(calls)
        os.close(answers)
        child = Child(pid, to_child, from_child, self._generation)
        self.selector.register(from_child, selectors.EVENT_READ, child)
        return child

    def _kill(self, child: Child, reason: str) -> None:
        child.killed = reason
        os.kill(child.pid, signal.SIGKILL)

    def _reap(self, child: Child) -> int:
        """Wait for a child that has ended, or ends once its pipe is closed; return its code."""
        self.selector.unregister(child.answers)
        os.close(child.calls)
        os.close(child.answers)
        return os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])

    def _conclude(
        self, message: dict[str, Any], ready: bool, result: Mapping[str, Any], ended: str
    ) -> None:
        """Answer a call; `ended` is how its child ended without a result."""
        name = message["call"][0]
        if ended == "late":
            self._answer(message, {"error": f"took longer than {message['seconds']:g} s"})
            return
        if "import" in result and self._import(message, result["import"]):
            self.take(message)
            return
        with suppress(ValueError, TypeError, KeyError):
            if ready:
                self._answer(message, {"parts": parts_of(name, result["score"])})
                return
        problems = {
            "cpu": f"took more than its processor time, {self._cpu_seconds:g} s",
            "long": "gave too long an answer",
            "": "gave no score",
        }
        problem = str(result.get("error") or problems.get(ended, ended))
        if ready and ended != _ended(-signal.SIGKILL) and not result.get("failed"):
            self._answer(message, {"parts": {name: 0.0}, "note": problem})
        else:
            self._answer(message, {"error": problem})

    def _import(self, message: dict[str, Any], names: Any) -> bool:
        """Import what a library lacked, as far as it is loaded here; True to repeat the call."""
        message["imports"] = message.get("imports", 0) + 1
        before = len(sys.modules)
        for name in names if isinstance(names, list) else ():
            root = str(name).partition(".")[0]
            known = root in sys.modules or root in sys.stdlib_module_names
            if known and root not in NOT_IMPORTED and not str(name).endswith("__main__"):
                with suppress(Exception):
                    importlib.import_module(name)
        if len(sys.modules) == before or message["imports"] > MOST_IMPORTS:
            return False
        self._generation += 1
        return True

    def _answer(self, message: dict[str, Any], answer: dict[str, Any]) -> None:
        whole = {"id": message["id"], "resident": resident_bytes(), **answer}
        line = json.dumps(whole).encode() + b"\n"
        while line:
            line = line[os.write(self._out, line) :]


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
        return "was killed, perhaps for lack of memory on the machine"
    return f"ended its process ({signal.Signals(-code).name})" if code < 0 else ""


def main() -> None:
    """Serve until the input ends."""
    memory, parent = int(sys.argv[1]), int(sys.argv[2])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before
        return
    with suppress(OSError):  # cores that a cpuset has taken away since
        os.sched_setaffinity(0, map(int, sys.argv[3].split(",")))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    inside, out = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(null, descriptor)
    server, rest = Server(out, memory, float(sys.argv[4])), b""
    server.selector.register(inside, selectors.EVENT_READ)
    gc.disable()  # a collection would copy the memory that children share
    while True:
        for key, _ in server.selector.select(server.seconds()):
            if key.data is not None:
                server.read(key.data)
                continue
            block = os.read(inside, 1 << 20)
            if not block:
                os._exit(0)
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                server.take(json.loads(line))
        server.kill_late()


if __name__ == "__main__":
    main()
